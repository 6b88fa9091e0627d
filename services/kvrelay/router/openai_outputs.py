"""The outputs of all prompts of one call, in the order they come, for one reader.

    front.generate ─pump─▶ ┐
    front.generate ─pump─▶ ├─▶ bounded mailbox ─▶ `take` ─▶ everything that is there, or nothing after a while
    receive() ────watcher─▶┘                          └▶ raises what ended a pump; ClientGone if the client has left

A pump waits while the mailbox is full, so a slow reader fills the coordinator's own bounded queue, which ends it.
Leaving the `async with` cancels every pump, and with it the request on every worker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any

from kvrelay.core.output import Output
from kvrelay.router.front import FrontDoor
from kvrelay.router.openai_call import Call, outputs_of
from kvrelay.router.patience import Patience

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Item = tuple[int, Output]
"""Which prompt, and what."""
MAX_HELD = 64


class ClientGone(Exception):
    """Nobody is left to answer. No error of anyone's; it only ends the work."""


class Bounded:
    """A `send` that raises ClientGone when the client has stopped reading, or is no longer there."""

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._patience = Patience()

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        try:
            with self._patience.for_s(self._timeout_s):
                await self._send(message)
        except (TimeoutError, OSError) as error:
            raise ClientGone from error

    def close(self) -> None:
        self._patience.close()


class Outputs:
    def __init__(self, front: FrontDoor, call: Call, receive: Receive) -> None:
        self._front = front
        self._call = call
        self._receive = receive
        self._items: deque[Item] = deque()
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._pumps: list[asyncio.Task[None]] = []
        self._watcher: asyncio.Task[None] | None = None
        self._num_running = 0
        self._failure: BaseException | None = None
        self._patience = Patience()

    async def __aenter__(self) -> Outputs:
        for number, request in enumerate(self._call.requests):
            pump = asyncio.create_task(self._pump(number, outputs_of(self._front, request)))
            pump.add_done_callback(self._on_pump_done)
            self._pumps.append(pump)
        self._num_running = len(self._pumps)
        self._watcher = asyncio.create_task(self._watch())
        self._watcher.add_done_callback(self._on_watcher_done)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patience.close()
        tasks = [*self._pumps, *([self._watcher] if self._watcher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def take(self, timeout_s: float | None = None) -> list[Item] | None:
        """What has come, at least one item; an empty list after `timeout_s` of silence; None at the end of all.

        What came before a failure is handed out first, then the failure is raised.
        """
        try:
            with self._patience.for_s(timeout_s):
                while not self._items and self._failure is None and self._num_running:
                    self._readable.clear()
                    await self._readable.wait()
        except TimeoutError:
            return []
        if isinstance(self._failure, ClientGone) or (self._failure is not None and not self._items):
            raise self._failure
        if not self._items:
            return None
        taken = list(self._items)
        self._items.clear()
        self._writable.set()
        return taken

    async def _pump(self, number: int, outputs: AsyncIterator[Output]) -> None:
        try:
            async for output in outputs:
                while len(self._items) >= MAX_HELD:
                    self._writable.clear()
                    await self._writable.wait()
                self._items.append((number, output))
                self._readable.set()
        finally:
            if isinstance(outputs, AsyncGenerator):
                await outputs.aclose()

    def _on_pump_done(self, pump: asyncio.Task[None]) -> None:
        self._num_running -= 1
        self._end_with(pump)

    def _on_watcher_done(self, watcher: asyncio.Task[None]) -> None:
        self._end_with(watcher)

    def _end_with(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and self._failure is None:
            self._failure = task.exception()
        self._readable.set()

    async def _watch(self) -> None:
        """A server without a proxy in front tells of a client that left by a message, not by a cancellation."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        raise ClientGone
