"""`Worker.Attach`: one stream per router carries everything between the two.

    Hello ─▶ (an older stream of the same router ends, its work is aborted) ─▶ Welcome
      ─▶ Start, Cancel, Migrate, beats in · one Events message per step, beats out
      ─▶ end of the stream for whatever reason: everything it carried is aborted

Lives on the process's asyncio loop. The engine is reached through its mailbox only and answers through `deliver`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvrelay.core.config import LinkSettings
from kvrelay.core.errors import BadRequest, Unavailable
from kvrelay.core.events import TERMINAL, Event, Failed, FailReason, Refused, RefuseReason
from kvrelay.core.faults import Faults
from kvrelay.core.handles import HandleSeal
from kvrelay.core.handoff import PROTOCOL_VERSION, Receiver
from kvrelay.core.ids import Attempt, Choice, RequestId, RouterId, SeqKey
from kvrelay.core.placement import Load, WorkerRecord
from kvrelay.core.ports import EngineInbox
from kvrelay.core.request import Leg, Start
from kvrelay.observe.metrics import WorkerMetrics
from kvrelay.pb import worker_pb2 as pb
from kvrelay.pb import worker_pb2_grpc
from kvrelay.rpc.attach import GrpcWorkerEnd, StreamBroken, WorkerEnd
from kvrelay.rpc.faults import FaultyWorkerEnd
from kvrelay.rpc.records import record_to_pb
from kvrelay.rpc.starts import cancelled_keys, migrate_from_pb, start_from_pb
from kvrelay.worker.ledger import Admission, Ledger
from kvrelay.worker.link import Link

BUSY_RETRY_MS = 250
"""To a router over its share of reservations: one that commits makes room."""

log = logging.getLogger(__name__)


class AttachService(worker_pb2_grpc.WorkerServicer):
    """`open` before the server starts: what is said in Welcome is known only once the ports are."""

    def __init__(
        self, inbox: EngineInbox, settings: LinkSettings, *, engine_age_ms: Callable[[], float], metrics: WorkerMetrics,
        seal: HandleSeal, max_reservations: int, faults: Faults | None = None,
    ) -> None:
        """`max_reservations`: of one router; `seal`: signs them, and the transfer side checks with it."""
        self._inbox = inbox
        self._settings = settings
        self._engine_age_ms = engine_age_ms
        self._metrics = metrics
        self._seal = seal
        self._max_reservations = max_reservations
        self._faults = faults
        self._ledger: Ledger[Link] = Ledger()
        self._links: dict[RouterId, Link] = {}
        self._record: WorkerRecord | None = None
        self._receivers: tuple[Receiver, ...] = ()
        self._load = Load()
        self._closed = ""

    @property
    def num_open(self) -> int:
        """Sequences that some router still waits for."""
        return self._ledger.num_open

    def open(self, record: WorkerRecord, load: Load) -> None:
        self._record, self._load = record, load
        receiver = Receiver(record.worker_id, record.incarnation, record.push_address, record.shard)
        self._receivers = (receiver,)

    def load(self) -> Load:
        """The newest one, with the age of the engine as of now."""
        return replace(self._load, engine_age_ms=self._engine_age_ms())

    def deliver(self, events: Sequence[Event], load: Load) -> None:
        """All events of a step, to the streams that own them. Events that nobody waits for are dropped."""
        self._load = load
        self._metrics.load_reported(load)
        shares: dict[Link, list[Event]] = {}
        for event in events:
            owner = self._ledger.owner(event.key)
            if owner is not None:
                shares.setdefault(owner, []).append(event)
            if isinstance(event, TERMINAL):
                self._ledger.close(event.key)
            if isinstance(event, Failed):
                self._count_failure(event)
        for link, share in shares.items():
            self._send(link, share)

    def end_all(self, reason: str) -> None:
        """Every stream has lost events: end them, abort what they carried."""
        for link in list(self._links.values()):
            self._drop(link, reason)

    def fail_all(self, reason: str) -> None:
        """The engine is gone: tell every router about every sequence, then end the streams and take no new ones."""
        self._closed = reason
        for link in list(self._links.values()):
            keys = self._ledger.forget(link)
            self._send(link, [Failed(key, FailReason.ENGINE, reason) for key in keys])
            link.finish()

    async def close(self, grace_s: float) -> None:
        """Write what is queued, end the streams, wait until their handlers are over (at most `grace_s`)."""
        self._closed = self._closed or "this worker is going down"
        links = list(self._links.values())
        for link in links:
            link.finish()
        try:
            async with asyncio.timeout(grace_s):
                for link in links:
                    await link.done.wait()
        except TimeoutError:
            self.end_all("this worker is going down")

    def announce_draining(self) -> None:
        """Let every router know now, not with the next beat."""
        self._load = replace(self._load, draining=True)
        for link in self._links.values():
            link.outbox.beat(self.load())

    async def wait_empty(self) -> None:
        """Until no router waits for anything."""
        await self._ledger.wait_empty()

    async def Attach(self, request_iterator: object, context: Any) -> None:
        await self.serve(GrpcWorkerEnd(context))

    async def serve(self, end: WorkerEnd) -> None:
        """One stream, from its Hello to its end."""
        if self._faults is not None:
            end = FaultyWorkerEnd(end, self._faults, self._record.worker_id if self._record is not None else "")
        router_id = await self._hello(end)
        link = Link(router_id, self._settings, self._receivers)
        self._replace(link)
        try:
            await end.write(pb.WorkerMessage(welcome=self._welcome()))
            reason = await link.run(end, lambda message: self._dispatch(link, message), self.load)
        except StreamBroken as broken:
            reason = str(broken)
        finally:
            self._drop(link, "over")
            link.done.set()
        if reason:
            log.warning("the stream of router %s ended: %s", router_id, reason)
            raise Unavailable(reason)

    async def _hello(self, end: WorkerEnd) -> RouterId:
        try:
            async with asyncio.timeout(self._settings.silence_s):
                message = await end.read()
        except TimeoutError:
            raise Unavailable(f"no hello within {self._settings.silence_s:g} s") from None
        except StreamBroken as broken:
            raise Unavailable(str(broken)) from None
        if self._closed:
            raise Unavailable(self._closed)
        if message is None or message.WhichOneof("kind") != "hello" or not message.hello.router_id:
            raise BadRequest("a stream begins with a hello that names the router")
        if message.hello.protocol != PROTOCOL_VERSION:
            raise BadRequest(
                f"this worker speaks protocol {PROTOCOL_VERSION}, the router {message.hello.protocol}; "
                "run the same version of kvrelay on both"
            )
        return RouterId(message.hello.router_id)

    def _welcome(self) -> pb.Welcome:
        if self._record is None:
            raise Unavailable("this worker is still starting")
        return record_to_pb(self._record, self.load())

    def _replace(self, link: Link) -> None:
        older = self._links.get(link.router_id)
        if older is not None:
            self._drop(older, "this router has attached again")
        self._links[link.router_id] = link
        self._metrics.routers_attached(len(self._links))

    def _drop(self, link: Link, reason: str) -> None:
        """The end of a stream aborts everything it carried. Doing it twice is doing it once."""
        for key in self._ledger.forget(link):
            self._inbox.cancel(key)
        if self._links.get(link.router_id) is link:
            del self._links[link.router_id]
            self._metrics.routers_attached(len(self._links))
        link.end(reason)

    def _count_failure(self, event: Failed) -> None:
        if event.reason is FailReason.PREEMPTED:
            self._metrics.sequence_preempted()
        self._metrics.sequence_failed(event.reason.value)

    def _send(self, link: Link, events: Sequence[Event]) -> None:
        link.settle(events)
        if not link.outbox.put(events, self.load()):
            self._drop(link, f"the router reads too slowly: over {self._settings.max_outbox_bytes} bytes are waiting")

    def _dispatch(self, link: Link, message: pb.RouterMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "start":
            self._start(link, message.start)
        elif kind == "cancel":
            self._cancel(link, message.cancel)
        elif kind == "migrate":
            self._migrate(link, message.migrate)

    def _start(self, link: Link, message: pb.Start) -> None:
        try:
            start = start_from_pb(message)
        except BadRequest as error:
            self._refuse(link, message, error.message)
            return
        admission = self._ledger.admit(start, link)
        if admission is Admission.NEW and self._may_begin(link, start):
            self._inbox.submit(start)
        elif admission is Admission.STALE:
            self._refuse(link, message, f"a newer attempt than {start.attempt} of {start.request_id} is open here")

    def _cancel(self, link: Link, message: pb.Cancel) -> None:
        started = self._ledger.choices(link, RequestId(message.request_id), Attempt(message.attempt))
        for key in cancelled_keys(message, started):
            if key.choice in started:
                self._inbox.cancel(key)

    def _migrate(self, link: Link, message: pb.Migrate) -> None:
        migrate = migrate_from_pb(message)
        if self._ledger.owner(migrate.key) is link:
            self._inbox.migrate(migrate)

    def _may_begin(self, link: Link, start: Start) -> bool:
        """A reservation counts against its router and gets its handle. False: refused."""
        if start.leg is not Leg.RECEIVE or start.transfer_id is None:
            return True
        keys = [start.key(choice) for choice in start.choices]
        if link.num_reservations < self._max_reservations or start.replay:
            link.reserve(keys, self._seal.sign(start.transfer_id, start.cache_salt, start.timeout_ms))
            return True
        why = f"this router has {link.num_reservations} reservations open here, and may have no more"
        for key in keys:
            self._ledger.close(key)
        self._send(link, [Refused(key, RefuseReason.NO_ROOM, why, BUSY_RETRY_MS) for key in keys])
        return False

    def _refuse(self, link: Link, message: pb.Start, why: str) -> None:
        """Every Start gets its terminal events, also one that no engine should ever see."""
        request_id, attempt = RequestId(message.request_id), Attempt(message.attempt)
        keys = [SeqKey(request_id, Choice(choice), attempt) for choice in message.choices or (0,)]
        self._send(link, [Refused(key, RefuseReason.BAD_START, why) for key in keys])
