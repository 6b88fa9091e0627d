"""The outputs of all prompts of one call, in the order they come, for one reader.

    front.open ──────────▶ ┐
    front.open ──────────▶ ├─ one bell ─▶ `take` ─▶ everything that is there, or nothing after a while
    receive() ────watcher─▶┘                   └▶ raises what ended a request; ClientGone if the client has left

Nothing is queued here: a slow reader leaves it in the coordinator's own bounded queue, which ends the request.
Leaving the `async with` closes every request, which cancels it on every worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any

from kvrelay.core.errors import KvrelayError
from kvrelay.core.output import Output
from kvrelay.router.bell import Bell
from kvrelay.router.front import FrontDoor, OpenRequest
from kvrelay.router.openai_call import Call, open_request
from kvrelay.router.patience import Patience

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Item = tuple[int, Output]
"""Which prompt, and what."""


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
        self._bell = Bell()
        self._opened: list[OpenRequest] = []
        self._running: dict[int, OpenRequest] = {}
        """By number of the prompt: those that have not ended."""
        self._watcher: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._patience = Patience()

    async def __aenter__(self) -> Outputs:
        self._open_all()
        self._watcher = asyncio.create_task(self._watch())
        self._watcher.add_done_callback(self._on_watcher_done)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patience.close()
        assert self._watcher is not None
        self._watcher.cancel()
        closing = (request.close() for request in self._opened)
        await asyncio.gather(self._watcher, *closing, return_exceptions=True)

    async def take(self, timeout_s: float | None = None) -> list[Item] | None:
        """What has come, at least one item; an empty list after `timeout_s` of silence; None at the end of all.

        What came before a failure is handed out first, then the failure is raised.
        """
        try:
            with self._patience.for_s(timeout_s):
                while not (items := self._look()) and self._failure is None and self._running:
                    await self._bell.wait()
        except TimeoutError:
            return []
        if isinstance(self._failure, ClientGone) or (self._failure is not None and not items):
            raise self._failure
        return items or None

    def _open_all(self) -> None:
        try:
            for number, request in enumerate(self._call.requests):
                self._opened.append(open_request(self._front, request, self._bell))
                self._running[number] = self._opened[-1]
        except KvrelayError as error:
            self._failure = error

    def _look(self) -> list[Item]:
        items: list[Item] = []
        for number, request in list(self._running.items()):
            try:
                outputs = request.take()
            except KvrelayError as error:
                self._failure = self._failure or error
                outputs = None
            if outputs is None:
                del self._running[number]
            else:
                items += [(number, output) for output in outputs]
        return items

    def _on_watcher_done(self, watcher: asyncio.Task[None]) -> None:
        if not watcher.cancelled() and self._failure is None:
            self._failure = watcher.exception()
        self._bell.ring()

    async def _watch(self) -> None:
        """A server without a proxy in front tells of a client that left by a message, not by a cancellation."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        raise ClientGone
