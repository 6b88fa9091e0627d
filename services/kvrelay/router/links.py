"""One Attach stream to one worker address: kept up, beating, and shared by all requests of this router and worker.

    DOWN ─dial─▶ Hello ─▶ Welcome ─▶ UP ─▶ silence · error · end ─▶ every leg: Lost ─▶ DOWN ─wait ≤ 1 s─▶ dial
                            └─ a second way to a worker that is up already: hang up, look again later

A stream belongs to one incarnation, so what arrives on it can only be about legs that were started on it; legs that
are unknown here are stale, and dropped. The end of a stream is the end of its legs, at once. Silence is counted in
beats of this loop, not in clock time: a router that was itself held up for seconds blames no worker.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from typing import Protocol

from kvrelay.core.config import LinkSettings
from kvrelay.core.errors import BadRequest, KvrelayError
from kvrelay.core.events import Reserved
from kvrelay.core.handoff import PROTOCOL_VERSION
from kvrelay.core.ids import Attempt, Choice, RequestId
from kvrelay.core.placement import Load, WorkerRecord, WorkerView
from kvrelay.core.request import Leg, Migrate, Start
from kvrelay.pb import worker_pb2 as pb
from kvrelay.router.link_port import Arrival, Deliver, Lost
from kvrelay.router.pending import Pending
from kvrelay.rpc.attach import CANCELLED, Dial, RouterEnd, StreamBroken
from kvrelay.rpc.events import event_from_pb, receivers_of
from kvrelay.rpc.records import load_from_pb, record_from_pb
from kvrelay.rpc.starts import cancel_to_pb, migrate_to_pb, start_to_pb

log = logging.getLogger(__name__)

FIRST_WAIT_S, MAX_WAIT_S = 0.1, 1.0
DUPLICATE_WAIT_S = 5.0
MAX_OUTBOX = 4096
"""Messages waiting for one worker. It reads all the time; more than this means that it has stopped."""

LegKey = tuple[RequestId, Attempt]


class LinkOwner(Protocol):
    def may_attach(self, link: WorkerLink, record: WorkerRecord) -> bool:
        """False: this worker is attached by another link already."""
        ...

    def changed(self, link: WorkerLink) -> None:
        """It went up or down, or reported its load."""
        ...


class Outbox:
    """What waits to be written to one worker."""

    def __init__(self) -> None:
        self._messages: deque[pb.RouterMessage] = deque()
        self._wake = asyncio.Event()
        self.overflown = False

    def put(self, message: pb.RouterMessage) -> None:
        self.overflown = self.overflown or len(self._messages) >= MAX_OUTBOX
        if not self.overflown:
            self._messages.append(message)
        self._wake.set()

    async def next(self, patience_s: float) -> pb.RouterMessage:
        """A beat when nothing else has come within `patience_s`."""
        if not self._messages:
            self._wake.clear()
            try:
                async with asyncio.timeout(patience_s):
                    await self._wake.wait()
            except TimeoutError:
                return pb.RouterMessage(beat=pb.RouterBeat())
        return self._messages.popleft()


class WorkerLink:
    """Implements LinkPort. `run` is its one task; everything happens on the router's loop."""

    def __init__(
        self, address: str, router_id: str, settings: LinkSettings, owner: LinkOwner, *, dial: Dial,
        give_up_s: float | None = None,
    ) -> None:
        """`router_id` names this link: the worker ends an older stream of the same name. `give_up_s`: how long it may
        be down before `run` returns; None: for ever."""
        self.address = address
        self.is_up = False
        self.is_retired = False
        """Its worker has said good-bye: keep the stream as long as it lasts, and do not dial again."""
        self._router_id = router_id
        self._settings = settings
        self._owner = owner
        self._give_up_s = give_up_s
        self._dial = dial
        self._record: WorkerRecord | None = None
        self._load = Load()
        self._pending = Pending()
        self._legs: dict[LegKey, Deliver] = {}
        self._outbox = Outbox()
        self._num_silent_beats = 0
        """Since the worker last said something."""
        self._num_stuck_beats: int | None = None
        """Since the write that is under way began; None between two writes."""
        self._wait_s = FIRST_WAIT_S
        self._down_since: float | None = None

    @property
    def record(self) -> WorkerRecord:
        if self._record is None:
            raise BadRequest(f"{self.address} has not introduced itself yet")
        return self._record

    @property
    def is_static(self) -> bool:
        """Somebody wrote its address into the configuration: it is dialled for ever."""
        return self._give_up_s is None

    @property
    def is_known(self) -> bool:
        return self._record is not None

    def view(self) -> WorkerView:
        return WorkerView(self.record, self._pending.applied_to(self._load), self.is_up)

    @property
    def num_legs(self) -> int:
        return len(self._legs)

    # LinkPort.

    def start(self, start: Start, deliver: Deliver, num_blocks: int) -> None:
        if not self.is_up:
            deliver(Lost(self.record.worker_id, start.attempt, f"the stream to {self.address} is down"))
            return
        key = (start.request_id, start.attempt)
        self._legs[key] = deliver
        self._pending.add(key, num_blocks, 0 if start.leg is Leg.RECEIVE else start.num_tokens)
        self._outbox.put(pb.RouterMessage(start=start_to_pb(start)))

    def cancel(self, request_id: RequestId, attempt: Attempt, choices: tuple[Choice, ...] = ()) -> None:
        if not choices:
            self.forget(request_id, attempt)
        if self.is_up:
            self._outbox.put(pb.RouterMessage(cancel=cancel_to_pb(request_id, attempt, choices)))

    def migrate(self, migrate: Migrate) -> None:
        if self.is_up:
            self._outbox.put(pb.RouterMessage(migrate=migrate_to_pb(migrate)))

    def forget(self, request_id: RequestId, attempt: Attempt) -> None:
        self._legs.pop((request_id, attempt), None)
        self._pending.drop((request_id, attempt))

    # The life of the stream.

    async def run(self) -> None:
        """Dials until cancelled, retired, or down for `give_up_s`."""
        loop = asyncio.get_running_loop()
        self._down_since = loop.time()
        while True:
            why = await self._attach()
            log.debug("not attached to %s: %s", self.address, why)
            down_s = loop.time() - (self._down_since or loop.time())
            given_up = self._give_up_s is not None and down_s > self._give_up_s
            if self.is_retired or given_up:
                return
            await asyncio.sleep(self._wait_s)
            self._wait_s = min(MAX_WAIT_S, 2 * self._wait_s)

    async def _attach(self) -> str:
        """Why the stream ended."""
        end = self._dial(self.address)
        why = "this router let it go"
        tasks: list[asyncio.Task[str]] = []
        try:
            refused = await self._greet(end)
            if refused:
                return refused
            loop = asyncio.get_running_loop()
            self._num_silent_beats, self._num_stuck_beats = 0, None
            tasks = [loop.create_task(part) for part in (self._read(end), self._write(end), self._watch())]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ended = done.pop()
            why = CANCELLED if ended.cancelled() else ended.result()
            return why
        finally:
            if self.is_up:
                self._go_down(why)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await end.close()

    async def _greet(self, end: RouterEnd) -> str:
        """Hello, Welcome. Empty when the stream is up."""
        hello = pb.Hello(router_id=self._router_id, protocol=PROTOCOL_VERSION)
        try:
            async with asyncio.timeout(self._settings.silence_s):
                await end.write(pb.RouterMessage(hello=hello))
                message = await end.read()
        except TimeoutError:
            return f"no welcome within {self._settings.silence_s:g} s"
        except StreamBroken as broken:
            return str(broken)
        if message.WhichOneof("kind") != "welcome":
            return "the worker did not begin with a welcome"
        return self._welcomed(message.welcome)

    def _welcomed(self, welcome: pb.Welcome) -> str:
        try:
            record, load = record_from_pb(welcome), load_from_pb(welcome.load)
        except (KvrelayError, ValueError) as error:
            return f"the welcome makes no sense: {error}"
        if not self._owner.may_attach(self, record):
            self._wait_s = DUPLICATE_WAIT_S
            return "already attached by another address"
        self._record, self._load = record, load
        self._outbox = Outbox()
        self._wait_s = FIRST_WAIT_S
        self._down_since = None
        self.is_up = True
        log.info("attached to %s (%s) at %s", record.worker_id, record.role.value, self.address)
        self._owner.changed(self)
        return ""

    async def _read(self, end: RouterEnd) -> str:
        try:
            while True:
                message = await end.read()
                self._num_silent_beats = 0
                self._on_message(message)
        except StreamBroken as broken:
            return str(broken)
        except BadRequest as error:
            return f"it said something that makes no sense: {error.message}"

    async def _write(self, end: RouterEnd) -> str:
        try:
            while not self._outbox.overflown:
                message = await self._outbox.next(self._settings.beat_s)
                self._num_stuck_beats = 0
                await end.write(message)
                self._num_stuck_beats = None
        except StreamBroken as broken:
            return str(broken)
        return f"did not take {MAX_OUTBOX} messages"

    async def _watch(self) -> str:
        """Ends when the worker has said nothing, or taken nothing, for too long."""
        max_beats = math.ceil(self._settings.silence_s / self._settings.beat_s)
        while True:
            await asyncio.sleep(self._settings.beat_s)
            self._num_silent_beats += 1
            if self._num_silent_beats > max_beats:
                return f"silent for {self._settings.silence_s:g} s"
            if self._num_stuck_beats is not None:
                self._num_stuck_beats += 1
                if self._num_stuck_beats > max_beats:
                    return f"took nothing for {self._settings.silence_s:g} s"

    def _on_message(self, message: pb.WorkerMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "events":
            for event in message.events.events:
                self._dispatch(event)
            self._reported(message.events.load)
        elif kind == "beat":
            self._reported(message.beat)

    def _dispatch(self, message: pb.Event) -> None:
        key = (RequestId(message.request_id), Attempt(message.attempt))
        deliver = self._legs.get(key)
        if deliver is not None:
            self._pending.drop(key)
            event = event_from_pb(message)
            receivers = receivers_of(message) if isinstance(event, Reserved) else ()
            deliver(Arrival(self.record.worker_id, event, receivers))

    def _reported(self, load: pb.Load) -> None:
        self._load = load_from_pb(load)
        self._pending.reported()
        self._owner.changed(self)

    def _go_down(self, why: str) -> None:
        self.is_up = False
        self._down_since = asyncio.get_running_loop().time()
        self._pending.clear()
        legs, self._legs = self._legs, {}
        for (_, attempt), deliver in legs.items():
            deliver(Lost(self.record.worker_id, attempt, f"the stream to {self.record.worker_id} ended: {why}"))
        log.warning("lost %s at %s with %d legs: %s", self.record.worker_id, self.address, len(legs), why)
        self._owner.changed(self)
