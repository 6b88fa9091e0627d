"""Whether Redis is asked at all: a pure state machine.

    CLOSED ─ 3 failures in a row ─▶ OPEN ─ after 1 s (then 2, then 4) ─▶ HALF_OPEN: one probe
       ▲                              ▲                                      │      │
       └──────── success ─────────────┼──────────────────────────────────────┘      │
                                      └──────────── failure ────────────────────────┘

The longest pause is 4 s, so that five seconds after Redis is back everything is normal again (RED-04).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from kvrelay.core.clock import Clock

MAX_FAILURES = 3
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 4.0


class State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Every `allow` that returned True is followed by exactly one of `succeeded`, `failed`, `abandoned`."""

    def __init__(self, clock: Clock, on_change: Callable[[State], None] = lambda state: None) -> None:
        self._clock = clock
        self._on_change = on_change
        self._state = State.CLOSED
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._retry_at = 0.0

    @property
    def state(self) -> State:
        return self._state

    def allow(self) -> bool:
        if self._state is State.CLOSED:
            return True
        if self._state is State.OPEN and self._clock.now() >= self._retry_at:
            self._become(State.HALF_OPEN)
            return True
        return False

    def succeeded(self) -> None:
        self._failures = 0
        if self._state is State.HALF_OPEN:
            self._pause_s = FIRST_PAUSE_S
            self._become(State.CLOSED)

    def failed(self) -> None:
        self._failures += 1
        if self._state is State.HALF_OPEN:
            self._pause_s = min(self._pause_s * 2, MAX_PAUSE_S)
            self._open()
        elif self._state is State.CLOSED and self._failures >= MAX_FAILURES:
            self._open()

    def abandoned(self) -> None:
        """The caller went away before there was an answer: says nothing about Redis; a probe may be made again."""
        if self._state is State.HALF_OPEN:
            self._become(State.OPEN)

    def _open(self) -> None:
        self._retry_at = self._clock.now() + self._pause_s
        self._become(State.OPEN)

    def _become(self, state: State) -> None:
        if state is not self._state:
            self._state = state
            self._on_change(state)
