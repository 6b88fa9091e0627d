"""A town whose router is joined to its workers by real links and Attach services, every seam under fault rules.

    guests ─▶ coordinators ─▶ Fleet, WorkerLink ─▶ Wire ─▶ AttachService ─▶ Plant: engine, desk ─pipe─▶ other plants
                    registry ◀┘       └────── rules ──────┘                        └──── rules ────┘

All on one loop, in virtual time. A `Wire` is what gRPC would be: an Attach stream in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvrelay.core.config import Config, LinkSettings, PlacementSettings
from kvrelay.core.errors import KvrelayError, Unavailable
from kvrelay.core.events import Event
from kvrelay.core.faults import Faults
from kvrelay.core.handles import HandleSeal
from kvrelay.core.ids import WorkerId
from kvrelay.core.placement import Load, Role, WorkerRecord
from kvrelay.observe.metrics import RouterMetrics, WorkerMetrics
from kvrelay.pb import worker_pb2 as pb
from kvrelay.placement.open import open_registry
from kvrelay.placement.policy import place
from kvrelay.router.admission import WaitingRoom
from kvrelay.router.coordinator import Kitchen
from kvrelay.router.fleet import Fleet
from kvrelay.router.session import SessionBook, cache_salt
from kvrelay.rpc.attach import RouterEnd, StreamBroken, WorkerEnd
from kvrelay.rpc.faults import faulty_dial
from kvrelay.text.output import OutputText
from kvrelay.transfer.faults import FaultyFrames, FaultyPipe
from kvrelay.transfer.pipes import LoopbackPipe
from kvrelay.worker.attach import AttachService
from tests.router.table import Letters
from tests.support.plant import IDENTITY, SHARD, Plant, blocks_of
from tests.support.town import STEP_S, SlowPipe, Town, TownGuest
from tests.support.virtual_time import VirtualTimeLoop

Serve = Callable[[WorkerEnd], Awaitable[None]]


class Wire:
    """The router's end. The worker's handler is a task of it: either side's end is the other's."""

    def __init__(self, serve: Serve) -> None:
        self._up: asyncio.Queue[pb.RouterMessage] = asyncio.Queue()
        self._down: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()
        self.serving = asyncio.ensure_future(serve(_WorkerSide(self._up, self._down)))

    async def write(self, message: pb.RouterMessage) -> None:
        if self.serving.done():
            raise StreamBroken(self._why())
        self._up.put_nowait(pb.RouterMessage.FromString(message.SerializeToString()))

    async def read(self) -> pb.WorkerMessage:
        getting = asyncio.ensure_future(self._down.get())
        try:
            await asyncio.wait({getting, self.serving}, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
            raise StreamBroken(self._why())
        finally:
            getting.cancel()

    async def close(self) -> None:
        self.serving.cancel()
        await asyncio.wait({self.serving})

    def _why(self) -> str:
        if self.serving.cancelled():
            return "connection reset"
        error = self.serving.exception()
        if error is not None and not isinstance(error, KvrelayError):
            raise error
        return str(error or "the worker has ended the stream")


class _WorkerSide:
    def __init__(self, up: asyncio.Queue[pb.RouterMessage], down: asyncio.Queue[pb.WorkerMessage]) -> None:
        self._up, self._down = up, down

    async def write(self, message: pb.WorkerMessage) -> None:
        self._down.put_nowait(pb.WorkerMessage.FromString(message.SerializeToString()))

    async def read(self) -> pb.RouterMessage | None:
        return await self._up.get()


class WiredWorker:
    """`EngineOutbox` of its plant; what happens in its engine is also noted in `town.seen`."""

    def __init__(self, town: WiredTown, name: str, role: Role, **settings: Any) -> None:
        self.town = town
        pipe = FaultyPipe(SlowPipe(town.door, town.frame_s), town.faults)
        self.plant = Plant(
            name, self, town.loop, door=town.door, pipe=pipe,
            wrap=lambda stream: FaultyFrames(stream, town.faults), **settings,
        )  # fmt: skip
        spec = self.plant.spec
        self.record = WorkerRecord(
            WorkerId(name), self.plant.incarnation, role, name, f"{name}-push", "town", IDENTITY, SHARD,
            num_blocks=spec.num_blocks, max_context=spec.max_sequence,
        )
        self.attach = AttachService(
            self.plant.engine, LinkSettings(), engine_age_ms=lambda: 0.0, metrics=WorkerMetrics(),
            seal=HandleSeal(town.loop), max_reservations=128, faults=town.faults,
        )
        self.attach.open(self.record, self.plant.engine.load())
        self.life = town.loop.create_task(self._live(), name=name)

    def on_step(self, events: Sequence[Event], load: Load) -> None:
        self.attach.deliver(events, load)
        self.town.seen.update(f"{self.record.role.value} {type(event).__name__}" for event in events)

    def on_death(self, error: BaseException) -> None:
        raise error

    async def _live(self) -> None:
        while True:
            self.plant.engine.step()
            await asyncio.sleep(STEP_S)

    def end(self) -> None:
        """The process is gone, whatever it was at."""
        self.life.cancel()
        self.plant.die()
        del self.town.inhabitants[self.record.address]
        self.town.cut(self.record.address)


class WiredTown(Town):
    """`open` before the first guest, `close` after the last one."""

    def __init__(self, faults: Faults, prefill: int = 2, decode: int = 2, *, frame_s: float = 0.02) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        self.loop, self.faults, self.frame_s = loop, faults, frame_s
        self.door = LoopbackPipe()
        self.seen: set[str] = set()
        """Role and kind of every event that an engine has reported, as in `decode Committed`."""
        self.inhabitants: dict[str, WiredWorker] = {}
        self._wires: list[tuple[str, Wire]] = []
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for index in range(count):
                name = f"{role.value}-{index}"
                self.inhabitants[name] = WiredWorker(self, name, role, max_batch_tokens=16)
        self._num_guests = 0

    async def open(self) -> None:
        """A router that knows every worker."""
        config = Config(placement=PlacementSettings(always_relay=True))
        metrics = RouterMetrics()
        self.room = WaitingRoom()
        self.registry = open_registry(  # type: ignore[assignment]
            config.placement, self.loop, metrics, self.faults
        )
        self.sessions = SessionBook(self.registry)
        self.router = Fleet(
            self.registry, LinkSettings(), config.placement, metrics, self.room.changed,
            faulty_dial(self._dial, self.faults),
        )
        self.kitchen = Kitchen(
            config=config, fleet=self.router, room=self.room, sessions=self.sessions, metrics=metrics, place=place,
            new_text=lambda request: OutputText(Letters(), request.stop, request.sampling.min_tokens),
            stopwatch=self.loop.time,
        )
        await self.router.start(list(self.inhabitants))
        await self.until(lambda: sum(view.attached for view in self.router.snapshot().workers) == len(self.inhabitants))

    async def close(self) -> None:
        await self.sessions.close()
        await self.router.stop()
        await self.registry.close()

    def cut(self, address: str = "") -> None:
        """The streams to this worker break, or all of them."""
        for to, wire in self._wires:
            if address in ("", to):
                wire.serving.cancel()

    def busy(self, role: Role) -> WiredWorker:
        """The one of this role that has work, else any."""
        of_role = [each for each in self.inhabitants.values() if each.record.role is role]
        return max(of_role, key=lambda each: each.attach.num_open)

    def has_orphans(self) -> bool:
        """An engine works at something for which no router waits any more. One choice per guest."""
        num_at_work = sum(len(each.plant.engine.work.by_key) for each in self.inhabitants.values())
        return num_at_work > self.router.num_legs

    async def assert_empty(self) -> None:
        """All workers that live, and the router's room."""
        await asyncio.sleep(10.0)
        for worker in self.inhabitants.values():
            worker.plant.assert_empty()
            assert worker.attach.num_open == 0
        assert len(self.room) == 0
        assert self.router.num_legs == 0

    def check_blocks(self, guest: TownGuest) -> None:
        """Whatever any worker would reuse holds what its name says. The guest was the only one."""
        spoken = [*guest.request.prompt_ids, *guest.expected()]
        known = blocks_of(spoken, cache_salt(guest.request.tenant))
        for worker in self.inhabitants.values():
            worker.plant.check()
            worker.plant.check_matchable(known)

    def _dial(self, address: str) -> RouterEnd:
        wire = Wire(self._serve(address))
        self._wires.append((address, wire))
        return wire

    def _serve(self, address: str) -> Serve:
        worker = self.inhabitants.get(address)
        return worker.attach.serve if worker is not None else _refuse


async def _refuse(end: WorkerEnd) -> None:
    raise Unavailable("connection refused")
