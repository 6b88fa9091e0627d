"""What keeps a worker honest about being alive.

    healthy ─(a vital task ends · the engine dies · a step takes too long)─▶ failed: streams failed at once,
                                                                            health says why, the process is to exit

Holds the one broad `except` of a worker's tasks. Only the command line ends the process; the library reports.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

log = logging.getLogger(__name__)


class Vitals(Protocol):
    """What can be seen of an engine from outside its thread."""

    @property
    def is_alive(self) -> bool: ...

    def age_ms(self) -> float: ...


class Supervisor:
    """Loop only. `fail` is final: the first reason stays."""

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self.reason = ""
        """Why this process must go; empty while it is healthy."""
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()

    def fail(self, reason: str) -> None:
        if self.reason:
            return
        self.reason = reason
        log.error("this worker has failed: %s", reason)
        self._over.set()
        self._on_failure(reason)

    def run(self, name: str, work: Callable[[], Awaitable[None]], *, restart_s: float | None = None) -> None:
        """Keep `work` going. Without `restart_s` its end is the end of the worker; with it, it is begun again."""
        task = asyncio.create_task(self._supervise(name, work, restart_s), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self) -> None:
        """Until something failed or `stop` was called."""
        await self._over.wait()

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._over.set()

    async def _supervise(self, name: str, work: Callable[[], Awaitable[None]], restart_s: float | None) -> None:
        while True:
            try:
                await work()
                ending = "it ended"
            except Exception as error:
                log.exception("%s failed", name)
                ending = str(error) or type(error).__name__
            if restart_s is None:
                self.fail(f"{name}: {ending}")
                return
            await asyncio.sleep(restart_s)


async def watch_engine(engine: Vitals, *, max_step_ms: float, every_s: float) -> None:
    """Returns never; raises RuntimeError when the engine is dead or stuck."""
    while True:
        if not engine.is_alive:
            raise RuntimeError("the engine thread has ended")
        age_ms = engine.age_ms()
        if age_ms > max_step_ms:
            raise RuntimeError(f"a step has been running for {age_ms:.0f} ms, more than max_step_ms = {max_step_ms:g}")
        await asyncio.sleep(every_s)
