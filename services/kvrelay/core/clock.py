"""Time as a dependency. Nothing below `cli` reads the wall clock directly.

Code that waits uses the running event loop's timers; tests run it on `tests/support/virtual_time.py`,
an event loop whose time jumps to the next timer, so that a ten-minute deadline takes microseconds.
Code that only asks for the time takes a `Clock`.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds. Only differences mean anything."""
        ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()


class FakeClock:
    """A clock that moves only when told to."""

    def __init__(self, start: float = 1_000.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds}")
        self._now += seconds
