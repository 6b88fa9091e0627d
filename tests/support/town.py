"""A router's requests on real engines and real transfers: whole lives in virtual time, without sockets or tensors.

    guests ─▶ coordinators ─▶ TownWorker (a link and the worker behind it) ─▶ Plant: engine, desk ─pipe─▶ other plants

What goes between router and worker passes through its wire form. Answers are compared with the model's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvrelay.core.config import Config, PlacementSettings, RouterSettings
from kvrelay.core.events import Event, Token
from kvrelay.core.handoff import Receiver
from kvrelay.core.ids import Attempt, Choice, RequestId, SeqKey, TokenId, WorkerId
from kvrelay.core.output import Delta, GenerateRequest
from kvrelay.core.placement import Load, Role, Snapshot, WorkerRecord, WorkerView
from kvrelay.core.request import Migrate, SamplingParams, Start
from kvrelay.engine.fakes import FakeModel
from kvrelay.observe.metrics import RouterMetrics
from kvrelay.pb import worker_pb2 as pb
from kvrelay.placement.memory import MemoryRegistry
from kvrelay.placement.policy import place
from kvrelay.router.admission import WaitingRoom
from kvrelay.router.coordinator import Kitchen
from kvrelay.router.delivery import Delivery
from kvrelay.router.link_port import Arrival, Deliver, LinkPort, Lost
from kvrelay.router.session import SessionBook
from kvrelay.rpc.events import event_from_pb, event_to_pb
from kvrelay.rpc.frames import Frame
from kvrelay.rpc.starts import migrate_from_pb, migrate_to_pb, start_from_pb, start_to_pb
from kvrelay.text.output import OutputText
from kvrelay.transfer.pipes import LoopbackPipe, Pipe, PushCall
from kvrelay.transfer.words import PushAnswer
from tests.router.table import Guest, Letters, Table
from tests.support.plant import IDENTITY, MAX_CONTEXT, SHARD, Plant
from tests.support.virtual_time import VirtualTimeLoop

STEP_S = 0.05


class SlowCall:
    """A Push whose frames take a while: there is a time in which it is under way."""

    def __init__(self, call: PushCall, frame_s: float) -> None:
        self._call = call
        self._frame_s = frame_s

    async def send(self, frame: Frame) -> None:
        await asyncio.sleep(self._frame_s)
        await self._call.send(frame)

    async def answer(self) -> PushAnswer:
        return await self._call.answer()

    def cancel(self) -> None:
        self._call.cancel()


class SlowPipe:
    def __init__(self, pipe: Pipe, frame_s: float) -> None:
        self._pipe = pipe
        self._frame_s = frame_s

    def connect(self, receiver: Receiver) -> PushCall:
        return SlowCall(self._pipe.connect(receiver), self._frame_s)

    async def close(self) -> None:
        await self._pipe.close()


class TownWorker:
    """The worker and the router's link to it: `LinkPort` on one side, `EngineOutbox` on the other."""

    def __init__(self, town: Town, name: str, role: Role, **settings: Any) -> None:
        self.town = town
        self.up = True
        self.legs: dict[tuple[RequestId, Attempt], tuple[Start, Deliver]] = {}
        pipe = SlowPipe(town.door, town.frame_s) if town.frame_s else town.door
        self.plant = Plant(name, self, town.loop, door=town.door, pipe=pipe, **settings)
        self._load = Load()
        self._record = WorkerRecord(
            WorkerId(name), self.plant.incarnation, role, name, f"{name}-push", "town", IDENTITY, SHARD,
            num_blocks=self.plant.spec.num_blocks, max_context=self.plant.spec.max_sequence,
        )
        self._task = town.loop.create_task(self._live(), name=name)

    @property
    def record(self) -> WorkerRecord:
        return self._record

    @property
    def is_idle(self) -> bool:
        work = self.plant.engine.work
        return not (work.by_key or len(work.sendings) or len(work.reservations)) and self.plant.desk.is_empty

    def view(self) -> WorkerView:
        return WorkerView(self._record, self._load, self.up)

    # EngineOutbox.

    def on_step(self, events: Sequence[Event], load: Load) -> None:
        self._load = load
        for event in events:
            wire = pb.Event.FromString(event_to_pb(event, (self.plant.receiver,)).SerializeToString())
            entry = self.legs.get((event.key.request_id, event.key.attempt))
            if entry is not None:
                receivers = (self.plant.receiver,) if wire.HasField("reserved") else ()
                entry[1](Arrival(self._record.worker_id, event_from_pb(wire), receivers))
        self.town.room.changed()

    def on_death(self, error: BaseException) -> None:
        raise error

    # LinkPort.

    def start(self, start: Start, deliver: Deliver, num_blocks: int) -> None:
        if not self.up:
            deliver(Lost(self._record.worker_id, start.attempt, "the stream is down"))
            return
        self.legs[start.request_id, start.attempt] = (start, deliver)
        self.plant.engine.submit(start_from_pb(pb.Start.FromString(start_to_pb(start).SerializeToString())))

    def cancel(self, request_id: RequestId, attempt: Attempt, choices: tuple[Choice, ...] = ()) -> None:
        entry = self.legs.get((request_id, attempt))
        if entry is not None:
            for choice in choices or entry[0].choices:
                self.plant.engine.cancel(SeqKey(request_id, choice, attempt))
        if not choices:
            self.forget(request_id, attempt)

    def migrate(self, migrate: Migrate) -> None:
        self.plant.engine.migrate(migrate_from_pb(pb.Migrate.FromString(migrate_to_pb(migrate).SerializeToString())))

    def forget(self, request_id: RequestId, attempt: Attempt) -> None:
        self.legs.pop((request_id, attempt), None)

    # Its life.

    async def _live(self) -> None:
        while True:
            self.plant.engine.step()
            await asyncio.sleep(STEP_S)

    async def drain(self, grace_s: float = 30.0) -> bool:
        """As `kvrelay worker` does on SIGTERM: everything that runs here has gone, or the grace is over."""
        self.plant.engine.drain()
        deadline = self.town.loop.time() + grace_s
        while not self.is_idle and self.town.loop.time() < deadline:  # noqa: ASYNC110  (virtual time)
            await asyncio.sleep(STEP_S)
        return self.is_idle

    def end(self) -> None:
        """The process is gone, whatever it was at."""
        self.up = False
        self._task.cancel()
        self.plant.die()
        del self.town.workers[self._record.worker_id]
        legs, self.legs = self.legs, {}
        for (_, attempt), (_, deliver) in legs.items():
            deliver(Lost(self._record.worker_id, attempt, "connection reset"))
        self.town.room.changed()


@dataclass
class TownGuest(Guest):
    def expected(self, choice: int = 0) -> tuple[TokenId, ...]:
        return tuple(token.token_id for token in self.expected_tokens(choice))

    def expected_tokens(self, choice: int = 0) -> list[Token]:
        request = self.request
        return FakeModel().drawn_from(
            request.prompt_ids, len(request.prompt_ids), request.sampling, Choice(choice), limit=MAX_CONTEXT
        )

    def tokens(self, choice: int = 0) -> list[Token]:
        return [
            token for each in self.outputs if isinstance(each, Delta) and each.choice == choice for token in each.tokens
        ]

    def assert_undisturbed(self) -> None:
        assert self.error is None, self.error
        for choice in range(self.request.n):
            assert self.ids(choice) == self.expected(choice)
            assert self.tokens(choice) == self.expected_tokens(choice)
            assert self.finish(choice).finish_reason == "length"
        total = sum(len(self.expected(choice)) for choice in range(self.request.n))
        assert self.summary.num_output_tokens == total
        assert self.summary.num_prompt_tokens == len(self.request.prompt_ids)


class Town(Table):
    def __init__(
        self, prefill: int = 1, decode: int = 1, *, frame_s: float = 0.0, worker: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """`worker`: engine settings. `settings`: the router's."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        self.loop = loop
        self.frame_s = frame_s
        self.door = LoopbackPipe()
        self.workers: dict[WorkerId, TownWorker] = {}
        self.everybody: list[TownWorker] = []
        """Those who have gone, too."""
        self.room = WaitingRoom()
        self._worker = worker or {}
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for index in range(count):
                self.add(f"{role.value}-{index}", role)
        config = Config(
            router=replace(RouterSettings(), **settings), placement=PlacementSettings(always_relay=True)
        )
        self.registry = MemoryRegistry(config.placement, loop)
        self.sessions = SessionBook(self.registry)
        self.kitchen = Kitchen(
            config=config, fleet=self, room=self.room, sessions=self.sessions, metrics=RouterMetrics(), place=place,
            new_text=lambda request: OutputText(Letters(), request.stop, request.sampling.min_tokens),
            stopwatch=loop.time,
        )
        self._num_guests = 0

    def add(self, name: str, role: Role, **settings: Any) -> TownWorker:
        assert name not in self.workers
        worker = TownWorker(self, name, role, **{**self._worker, **settings})
        self.workers[worker.record.worker_id] = worker
        self.everybody.append(worker)
        return worker

    # FleetPort.

    def snapshot(self) -> Snapshot:
        return Snapshot(tuple(worker.view() for worker in self.workers.values()))

    def link(self, worker_id: WorkerId) -> LinkPort | None:
        return self.workers.get(worker_id)

    def seat(  # type: ignore[override]
        self, sampling: SamplingParams, prompt: Sequence[int] = tuple(b"tell me a story"), **fields: Any
    ) -> TownGuest:
        self._num_guests += 1
        ids = tuple(map(TokenId, prompt))
        guest = TownGuest(GenerateRequest(RequestId(f"r{self._num_guests}"), ids, sampling, **fields))
        guest.delivery = Delivery(self.kitchen.config.router.max_delta_queue)
        guest.task = self.loop.create_task(self._dine(guest, guest.delivery, True), name=guest.request.request_id)
        return guest

    async def until(self, happened: Any, patience_s: float = 60.0) -> None:
        deadline = self.loop.time() + patience_s
        while not happened():
            assert self.loop.time() < deadline, "waited in vain"
            await asyncio.sleep(STEP_S)

    async def assert_empty(self) -> None:
        """All workers that live, and those that were drained before they went; no task but their lives and this."""
        await asyncio.sleep(10.0)
        for worker in self.workers.values():
            worker.plant.assert_empty()
            assert not worker.legs
        assert len(self.room) == 0
        await self.sessions.close()
        lives = {worker._task for worker in self.workers.values()}
        left = [task for task in asyncio.all_tasks() - lives if task is not asyncio.current_task()]
        assert not left, left
