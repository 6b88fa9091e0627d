"""A time limit that one task sets again and again, once per chunk of a stream, and that hardly ever strikes.

    with patience.for_s(t): ...   ─ in time ─▶ the timer stays armed; when due it moves on to the newest limit
                                  └ too long ▶ TimeoutError, as from `asyncio.timeout`

`asyncio.timeout` makes and cancels a timer each time. Here one timer per stream fires about once per `t`.
"""

from __future__ import annotations

import asyncio
from types import TracebackType


class Patience:
    """Belongs to the task that enters it first, and does not nest. `close` it in the end."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._until: float | None = None
        """Of the wait that is under way; None between two waits, and for a wait without limit."""
        self._limit_s: float | None = None
        self._task: asyncio.Task[object] | None = None
        self._num_cancels = 0
        """That the task had before this wait: those are not ours."""
        self._struck = False

    def for_s(self, limit_s: float | None) -> Patience:
        self._limit_s = limit_s
        return self

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __enter__(self) -> None:
        if self._limit_s is None:
            return
        task = self._task = self._task or asyncio.current_task()
        assert task is not None
        self._num_cancels = task.cancelling()
        self._until = until = self._loop.time() + self._limit_s
        if self._timer is None or until < self._timer_at:
            self._arm(until)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._until = None
        if not self._struck:
            return
        self._struck = False
        assert self._task is not None
        if self._task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _arm(self, at: float) -> None:
        self.close()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._due)

    def _due(self) -> None:
        self._timer = None
        if self._until is None:
            return
        if self._until > self._timer_at:
            self._arm(self._until)
        elif self._task is not None:
            self._struck = True
            self._task.cancel()
