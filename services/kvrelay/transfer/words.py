"""The few words that both halves of a transfer share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvrelay.core.handles import HandleSeal
from kvrelay.core.handoff import KvBytes, KvIdentity
from kvrelay.core.ids import Incarnation, WorkerId


class TransferWatch(Protocol):
    """Counts. Called on the transfer loop, once for every Push that was opened."""

    def transfer_ended(self, direction: str, outcome: str, num_bytes: int, seconds: float) -> None:
        """`direction`: "in" or "out". `outcome`: "committed" or "failed". `num_bytes`: KV payload moved."""
        ...


class Unwatched:
    """Nobody counts."""

    def transfer_ended(self, direction: str, outcome: str, num_bytes: int, seconds: float) -> None:
        pass


def outcome_of(error: str) -> str:
    return "failed" if error else "committed"


@dataclass(frozen=True, slots=True)
class Home:
    """This process, as it presents itself to the other side, and the pool it reads from or writes to."""

    worker_id: WorkerId
    incarnation: Incarnation
    identity: KvIdentity
    kv: KvBytes
    watch: TransferWatch = Unwatched()
    seal: HandleSeal | None = None
    """What a Push must show. None: nothing, as between the two ends of a test."""


@dataclass(frozen=True, slots=True)
class PushAnswer:
    """The receiver's last word on a Push."""

    committed: bool
    error: str = ""
    retryable: bool = True
    """False: this pair, or this key, will not fit another time either."""


class PushFailed(Exception):
    """This Push cannot be completed. The message names both values where two did not agree."""

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class PipeBroken(Exception):
    """The connection under a Push is gone, or the other side has ended the call."""
