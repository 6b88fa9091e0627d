"""What was just sent to a worker and is not in its load report yet.

    start ─▶ counted here ─▶ its first event, or the second report after it ─▶ counted by the worker

The first report after a Start may have been on its way already; the second one cannot.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from kvrelay.core.placement import Load

_REPORTS = 2


@dataclass(slots=True)
class _Sent:
    num_blocks: int
    num_tokens: int
    reports_left: int = _REPORTS


class Pending:
    def __init__(self) -> None:
        self._sent: dict[Hashable, _Sent] = {}

    def add(self, key: Hashable, num_blocks: int, num_tokens: int) -> None:
        """`num_tokens`: prompt tokens that this worker has to compute."""
        self._sent[key] = _Sent(num_blocks, num_tokens)

    def drop(self, key: Hashable) -> None:
        self._sent.pop(key, None)

    def clear(self) -> None:
        self._sent.clear()

    def reported(self) -> None:
        for key, sent in list(self._sent.items()):
            sent.reports_left -= 1
            if sent.reports_left == 0:
                del self._sent[key]

    def applied_to(self, load: Load) -> Load:
        """The load as it will be when the worker has seen everything. The blocks still add up to the pool."""
        if not self._sent:
            return load
        wanted = sum(sent.num_blocks for sent in self._sent.values())
        from_free = min(wanted, load.num_free)
        from_cached = min(wanted - from_free, load.num_cached)
        return replace(
            load,
            num_free=load.num_free - from_free,
            num_cached=load.num_cached - from_cached,
            num_held=load.num_held + from_free + from_cached,
            num_waiting=load.num_waiting + len(self._sent),
            waiting_tokens=load.waiting_tokens + sum(sent.num_tokens for sent in self._sent.values()),
        )
