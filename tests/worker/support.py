"""Builders for the worker's stories: a router's end of an Attach stream, and an engine that only takes notes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvrelay.core.clock import SystemClock
from kvrelay.core.config import LinkSettings
from kvrelay.core.events import Event, Token, Tokens
from kvrelay.core.handles import HandleSeal
from kvrelay.core.handoff import PROTOCOL_VERSION, Commit, KvIdentity, KvShard, Receiver
from kvrelay.core.ids import Attempt, Choice, Incarnation, RequestId, SeqKey, TokenId, TransferId, WorkerId
from kvrelay.core.placement import Load, Role, WorkerRecord
from kvrelay.core.request import Leg, Migrate, SamplingParams, Start
from kvrelay.observe.metrics import WorkerMetrics
from kvrelay.pb import worker_pb2 as pb
from kvrelay.pb import worker_pb2_grpc
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.events import event_from_pb, receivers_of
from kvrelay.rpc.server import bind, new_server
from kvrelay.rpc.starts import cancel_to_pb, start_to_pb
from kvrelay.worker.attach import AttachService

RECORD = WorkerRecord(
    worker_id=WorkerId("decode-1"), incarnation=Incarnation("first"), role=Role.DECODE, address="",
    push_address="push:1", model="tiny", identity=KvIdentity("m", "r", "t", 2, 2, 16, 16),
    shard=KvShard(0, 2, 0, 2, "float32"),
    num_blocks=64, max_context=256,
)
SEAL = HandleSeal(SystemClock())
LINK = LinkSettings(beat_s=0.05, silence_s=5.0)


def key(request_id: str = "r", choice: int = 0, attempt: int = 0) -> SeqKey:
    return SeqKey(RequestId(request_id), Choice(choice), Attempt(attempt))


def ids(values: Sequence[int]) -> tuple[TokenId, ...]:
    return tuple(map(TokenId, values))


def tokens(of: SeqKey, first_index: int, values: Sequence[int]) -> Tokens:
    return Tokens(of, first_index, tuple(Token(TokenId(value)) for value in values))


def local_start(
    request_id: str = "r", prompt: Sequence[int] = (1, 2, 3), *, attempt: int = 0, choices: Sequence[int] = (0,),
    max_tokens: int = 8, **extra: Any,
) -> Start:
    return Start(
        request_id=RequestId(request_id), attempt=Attempt(attempt), choices=tuple(map(Choice, choices)),
        token_ids=ids(prompt), num_prompt=len(prompt), leg=Leg.LOCAL,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0), **extra,
    )


class NotedInbox:
    """An engine's mailbox that keeps what was posted and answers nothing."""

    def __init__(self) -> None:
        self.starts: list[Start] = []
        self.cancelled: list[SeqKey] = []
        self.migrates: list[Migrate] = []
        self.is_draining = False
        self.posted = asyncio.Event()

    def submit(self, start: Start) -> None:
        self.starts.append(start)
        self.posted.set()

    def cancel(self, key: SeqKey) -> None:
        self.cancelled.append(key)
        self.posted.set()

    def landed(self, transfer_id: TransferId, commit: Commit, reply: Callable[[bool], None]) -> None: ...

    def push_ended(self, transfer_id: TransferId, error: str) -> None: ...

    def migrate(self, migrate: Migrate) -> None:
        self.migrates.append(migrate)
        self.posted.set()

    def send_level(self, transfer_id: TransferId) -> None: ...

    def send_ended(self, transfer_id: TransferId, error: str) -> None: ...

    def drain(self) -> None:
        self.is_draining = True

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.posted.clear()
            await self.posted.wait()


class RouterEnd:
    """A router's end of one stream. Beats only when told to."""

    def __init__(self, address: str, router_id: str = "router") -> None:
        self.router_id = router_id
        self.channel = open_channel(address)
        self.call: Any = worker_pb2_grpc.WorkerStub(self.channel).Attach()
        self._writing = asyncio.Lock()
        self.num_event_messages = 0
        self.receivers: dict[SeqKey, tuple[Receiver, ...]] = {}

    async def write(self, message: pb.RouterMessage) -> None:
        """One at a time: gRPC takes no second write while one is under way."""
        async with self._writing:
            await self.call.write(message)

    async def hello(self, protocol: int = PROTOCOL_VERSION) -> pb.Welcome:
        hello = pb.Hello(router_id=self.router_id, protocol=protocol)
        await self.write(pb.RouterMessage(hello=hello))
        message = await self.read()
        if message is None:
            raise ConnectionError(await self.call.details())
        return message.welcome

    async def start(self, start: Start) -> None:
        await self.write(pb.RouterMessage(start=start_to_pb(start)))

    async def cancel(self, of: SeqKey, *choices: int) -> None:
        message = cancel_to_pb(of.request_id, of.attempt, tuple(map(Choice, choices)))
        await self.write(pb.RouterMessage(cancel=message))

    async def beat(self) -> None:
        await self.write(pb.RouterMessage(beat=pb.RouterBeat()))

    async def read(self) -> pb.WorkerMessage | None:
        """The next message; None at the end of the stream."""
        try:
            message = await self.call.read()
        except grpc.aio.AioRpcError:
            return None
        return None if message is grpc.aio.EOF else message

    async def events(self) -> list[Event]:
        """The next message with events. Raises ConnectionError at the end of the stream."""
        while (message := await self.read()) is not None:
            if message.WhichOneof("kind") == "events":
                self.num_event_messages += 1
                for event in message.events.events:
                    self.note_receivers(event)
                return [event_from_pb(event) for event in message.events.events]
        raise ConnectionError(await self.call.details())

    def note_receivers(self, event: pb.Event) -> None:
        """Where a `Reserved` can be pushed; conversion to core leaves it aside."""
        if event.HasField("reserved"):
            self.receivers[event_from_pb(event).key] = receivers_of(event)

    async def ended(self) -> str:
        """Read to the end; the details of the status."""
        while await self.read() is not None:
            pass
        return str(await self.call.details())

    async def close(self) -> None:
        await self.channel.close()


class AttachStory:
    """An Attach server over a noted inbox, and the routers that came."""

    def __init__(self, service: AttachService, inbox: NotedInbox, address: str) -> None:
        self.service = service
        self.inbox = inbox
        self.address = address
        self.clock = SystemClock()
        self.routers: list[RouterEnd] = []

    async def router(self, router_id: str = "router") -> RouterEnd:
        end = RouterEnd(self.address, router_id)
        self.routers.append(end)
        await end.hello()
        return end

    def step(self, *events: Event, load: Load | None = None) -> None:
        self.service.deliver(events, load or Load(num_blocks=64, num_free=64))


@asynccontextmanager
async def attach_story(
    settings: LinkSettings = LINK, engine_age_ms: float = 0.0, max_reservations: int = 128
) -> AsyncIterator[AttachStory]:
    inbox = NotedInbox()
    service = AttachService(
        inbox, settings, engine_age_ms=lambda: engine_age_ms, metrics=WorkerMetrics(), seal=SEAL,
        max_reservations=max_reservations,
    )
    server = new_server()
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    service.open(RECORD, Load(num_blocks=64, num_free=64))
    await server.start()
    story = AttachStory(service, inbox, address)
    try:
        yield story
    finally:
        for router in story.routers:
            await router.close()
        await server.stop(None)
