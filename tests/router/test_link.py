"""One link under virtual time: who is to blame for silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kvrelay.core.config import LinkSettings
from kvrelay.core.placement import Load, Role, WorkerRecord
from kvrelay.pb import worker_pb2 as pb
from kvrelay.router.links import WorkerLink
from kvrelay.router.scripted import ScriptedFleet
from kvrelay.rpc.records import record_to_pb
from tests.support.virtual_time import VirtualTimeLoop, run_virtual

SETTINGS = LinkSettings(beat_s=0.25, silence_s=2.0)
BEAT = pb.WorkerMessage(beat=pb.Load())


class Line:
    """The router's end of a stream. What the worker says is put in; `stuck`: it takes nothing any more."""

    def __init__(self) -> None:
        record = ScriptedFleet().add("decode-0", Role.DECODE).record
        self.said: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()
        self.said.put_nowait(pb.WorkerMessage(welcome=record_to_pb(record, Load())))
        self.stuck = False

    async def read(self) -> pb.WorkerMessage:
        return await self.said.get()

    async def write(self, message: pb.RouterMessage) -> None:
        if self.stuck:
            await asyncio.Event().wait()

    async def close(self) -> None: ...

    async def beat(self) -> None:
        while True:
            self.said.put_nowait(BEAT)
            await asyncio.sleep(SETTINGS.beat_s)


class Owner:
    def may_attach(self, link: WorkerLink, record: WorkerRecord) -> bool:
        return True

    def changed(self, link: WorkerLink) -> None: ...


Story = Callable[[Line, WorkerLink], Coroutine[Any, Any, None]]


def play(story: Story) -> None:
    async def played() -> None:
        line = Line()
        link = WorkerLink("nowhere:1", "router", SETTINGS, Owner(), dial=lambda address: line)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(link.run())
            await story(line, link)
            running.cancel()

    run_virtual(played())


def test_a_silent_worker_is_lost_after_the_silence() -> None:
    async def story(line: Line, link: WorkerLink) -> None:
        await asyncio.sleep(SETTINGS.silence_s)
        assert link.is_up
        await asyncio.sleep(2 * SETTINGS.beat_s)
        assert not link.is_up

    play(story)


def test_a_worker_that_takes_nothing_is_lost_though_it_beats() -> None:
    async def story(line: Line, link: WorkerLink) -> None:
        beating = asyncio.create_task(line.beat())
        await asyncio.sleep(10 * SETTINGS.silence_s)
        assert link.is_up
        line.stuck = True
        await asyncio.sleep(SETTINGS.silence_s + 3 * SETTINGS.beat_s)
        assert not link.is_up
        beating.cancel()

    play(story)


def test_a_router_that_was_held_up_itself_blames_no_worker() -> None:
    async def story(line: Line, link: WorkerLink) -> None:
        beating = asyncio.create_task(line.beat())
        await asyncio.sleep(1.1)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.advance(60.0)  # as long as some coroutine did not give way; what came meanwhile is read after it
        loop.call_soon(line.said.put_nowait, BEAT)
        await asyncio.sleep(SETTINGS.beat_s)
        assert link.is_up
        beating.cancel()

    play(story)
