"""An event loop whose time jumps to the next timer: a ten-minute deadline takes microseconds.

    def test_deadline() -> None:
        run_virtual(story())          # `asyncio.sleep(600)` inside returns at once, in order

Only for code that waits on timers and on other coroutines. Code that waits on threads or sockets needs a real loop:
virtual time would run out before the other side has done anything.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[valid-type, misc]
    """Waits for nothing: hands the time it was asked to wait to the loop's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.loop: VirtualTimeLoop | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("deadlock: every coroutine waits and no timer is set")
        ready = super().select(0)
        if not ready and timeout > 0 and self.loop is not None:
            self.loop.advance(timeout)
        return list(ready)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        selector = _JumpingSelector()
        super().__init__(selector)
        selector.loop = self
        self._virtual = 1_000.0

    def time(self) -> float:
        return self._virtual

    def now(self) -> float:
        """So that the loop itself serves as the `Clock`."""
        return self._virtual

    def advance(self, seconds: float) -> None:
        self._virtual += seconds


def run_virtual(story: Coroutine[Any, Any, T]) -> T:
    loop = VirtualTimeLoop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(story)
    finally:
        _cancel_rest(loop)
        asyncio.set_event_loop(None)
        loop.close()


def _cancel_rest(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
