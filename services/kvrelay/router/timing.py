"""The seven moments of a request, and the breakdown of its time to first token that they give.

    accepted ─▶ issued ─▶ reserved ─▶ prefill begin ─▶ first token ─▶ committed ─▶ decode begin ─▶ finished
       └── waiting ─┘        the worker's own queue ends at prefill begin; it tells with the first token

Until the first token a new attempt starts the moments afresh; after it they stay as they are, so a replay does not
change the breakdown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.core.events import FirstToken
from kvrelay.core.output import Timing


@dataclass(slots=True)
class Moments:
    """Seconds of the router's stopwatch; None until it has happened."""

    now: Callable[[], float]
    accepted: float
    issued: float | None = None
    reserved: float | None = None
    prefill_begin: float | None = None
    first_token: float | None = None
    committed: float | None = None
    decode_begin: float | None = None
    finished: float | None = None
    worker_queue_ms: float = 0.0
    prefill_ms: float = 0.0
    overlap_ms: float = 0.0

    def on_issued(self) -> None:
        if self.first_token is None:
            self.issued, self.reserved = self.now(), None

    def on_reserved(self) -> None:
        if self.first_token is None:
            self.reserved = self.now()

    def on_first_token(self, event: FirstToken) -> None:
        if self.first_token is not None:
            return
        self.first_token = self.now()
        self.prefill_begin = self.first_token - event.prefill_ms / 1e3
        self.worker_queue_ms, self.prefill_ms, self.overlap_ms = event.queue_ms, event.prefill_ms, event.overlap_ms

    def on_committed(self) -> None:
        self.committed = self.committed or self.now()

    def on_tokens(self) -> None:
        self.decode_begin = self.decode_begin or self.now()

    def on_finished(self) -> None:
        self.finished = self.now()

    def breakdown(self) -> Timing:
        waited = _ms(self.accepted, self.issued)
        return Timing(
            queue=waited + self.worker_queue_ms,
            reserve=_ms(self.issued, self.reserved),
            prefill=self.prefill_ms,
            first_token=_ms(self.accepted, self.first_token),
            transfer_hidden=self.overlap_ms if self.reserved is not None else 0.0,
            transfer_unhidden=_ms(self.first_token, self.committed),
        )


def _ms(begin: float | None, end: float | None) -> float:
    if begin is None or end is None:
        return 0.0
    return max(0.0, (end - begin) * 1e3)
