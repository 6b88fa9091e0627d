"""Attach streams that do what fault rules say. One class per end; what each message is called is below.

A rule strikes where the message is written (`side: writer`, unless told otherwise) or where it is read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from kvrelay.core.faults import Action, Facts, Faults, Seam, never
from kvrelay.pb import worker_pb2 as pb
from kvrelay.rpc.attach import Dial, RouterEnd, StreamBroken, WorkerEnd

CUT = "cut by a fault rule"
Cut = Callable[[], Awaitable[None]]
M = TypeVar("M", pb.RouterMessage, pb.WorkerMessage)


def facts_of(message: pb.RouterMessage | pb.WorkerMessage, worker_id: str, side: str) -> Facts:
    kind = message.WhichOneof("kind") or ""
    facts: dict[str, str | frozenset[str]] = {"message": kind, "worker": worker_id, "side": side}
    if isinstance(message, pb.WorkerMessage):
        facts["event"] = frozenset(event.WhichOneof("kind") or "" for event in message.events.events)
        facts["request"] = frozenset(event.request_id for event in message.events.events)
    elif kind == "start":
        facts["request"] = message.start.request_id
    elif kind == "cancel":
        facts["request"] = message.cancel.request_id
    elif kind == "migrate":
        facts["request"] = message.migrate.request_id
    return facts


class _Direction(Generic[M]):
    """One direction of one stream at one end: what was stalled, half opened or cut stays so."""

    def __init__(self, seam: Seam, side: str, faults: Faults, worker_id: Callable[[], str]) -> None:
        self._seam, self._side = seam, side
        self._faults = faults
        self._worker_id = worker_id
        self._again: deque[M] = deque()
        self._goes_nowhere = False

    async def write(self, message: M, write: Callable[[M], Awaitable[None]], cut: Cut) -> None:
        for each in await self._meet(message, cut):
            await write(each)

    async def read(self, read: Callable[[], Awaitable[M | None]], cut: Cut) -> M | None:
        while not self._again:
            message = await read()
            if message is None:
                return None
            if self._goes_nowhere:
                continue
            self._again.extend(await self._meet(message, cut))
        return self._again.popleft()

    async def _meet(self, message: M, cut: Cut) -> list[M]:
        """What passes in the place of this message."""
        if self._goes_nowhere:
            return []
        rule = self._faults.meet(self._seam, facts_of(message, self._worker_id(), self._side))
        match rule.do if rule is not None else None:
            case Action.DELAY if rule is not None:
                await asyncio.sleep(rule.seconds)
            case Action.DUPLICATE:
                return [message, message]
            case Action.DROP:
                return []
            case Action.STALL:
                await never()
            case Action.HALF_OPEN:
                self._goes_nowhere = True
                return []
            case Action.CUT | Action.TRUNCATE | Action.CORRUPT:
                await cut()
                raise StreamBroken(CUT)
            case Action.KILL:
                self._faults.kill()
                return []
        return [message]


class FaultyRouterEnd:
    def __init__(self, end: RouterEnd, faults: Faults) -> None:
        self._end = end
        self._worker_id = ""
        self._up: _Direction[pb.RouterMessage] = _Direction(Seam.LINK_UP, "writer", faults, lambda: self._worker_id)
        self._down: _Direction[pb.WorkerMessage] = _Direction(Seam.LINK_DOWN, "reader", faults, lambda: self._worker_id)

    async def write(self, message: pb.RouterMessage) -> None:
        await self._up.write(message, self._end.write, self._end.close)

    async def read(self) -> pb.WorkerMessage:
        message = await self._down.read(self._read, self._end.close)
        if message is None:
            raise StreamBroken(CUT)
        return message

    async def close(self) -> None:
        await self._end.close()

    async def _read(self) -> pb.WorkerMessage | None:
        message = await self._end.read()
        if message.WhichOneof("kind") == "welcome":
            self._worker_id = message.welcome.worker_id
        return message


class FaultyWorkerEnd:
    """Breaking it ends the handler, and with that the stream."""

    def __init__(self, end: WorkerEnd, faults: Faults, worker_id: str) -> None:
        self._end = end
        self._up: _Direction[pb.RouterMessage] = _Direction(Seam.LINK_UP, "reader", faults, lambda: worker_id)
        self._down: _Direction[pb.WorkerMessage] = _Direction(Seam.LINK_DOWN, "writer", faults, lambda: worker_id)

    async def write(self, message: pb.WorkerMessage) -> None:
        await self._down.write(message, self._end.write, _leave_it_to_the_handler)

    async def read(self) -> pb.RouterMessage | None:
        return await self._up.read(self._end.read, _leave_it_to_the_handler)


async def _leave_it_to_the_handler() -> None:
    pass


def faulty_dial(dial: Dial, faults: Faults | None) -> Dial:
    """The same way to workers, through the rules if there are any."""
    return dial if faults is None else lambda address: FaultyRouterEnd(dial(address), faults)
