"""The identifiers of the cluster, each a type of its own so that swapped arguments are found by the checker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

RequestId = NewType("RequestId", str)
"""Minted by the router, never the client's own `x-request-id`: two clients may choose the same one."""
Choice = NewType("Choice", int)
"""Which of the `n` answers to one prompt, from 0."""
Attempt = NewType("Attempt", int)
"""Counts the `Start`s of one request, from 0. A message of an older attempt is stale and dropped."""
TransferId = NewType("TransferId", str)
"""Names one handoff. Minted by the router; accepts one Push, ever."""
WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", str)
"""A fresh random word per process start: the same worker id with another incarnation is another process."""
RouterId = NewType("RouterId", str)
SessionId = NewType("SessionId", str)
TenantId = NewType("TenantId", str)
TokenId = NewType("TokenId", int)
BlockId = NewType("BlockId", int)
"""Index into one process's KV pool. Never leaves that process."""
BlockHash = NewType("BlockHash", bytes)


@dataclass(frozen=True, slots=True)
class SeqKey:
    """Names one sequence everywhere on the wire; with the worker's incarnation it is unique for ever."""

    request_id: RequestId
    choice: Choice
    attempt: Attempt

    def __str__(self) -> str:
        return f"{self.request_id}/{self.choice}@{self.attempt}"
