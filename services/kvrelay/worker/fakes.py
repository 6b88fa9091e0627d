"""A worker without a model: speaks `Worker.Attach` on a real port and makes its tokens up. For tests of routers.

    LOCAL    FirstToken  Tokens*  Finished
    RECEIVE  Reserved  …  Committed  Tokens*  Finished          (waits for the fabric)
    SEND     FirstToken  …  Finished(handed_off | stop | length)  (hands over through the fabric)

`FakeFabric` stands for the network between workers: a prefill and a decode fake that share one can relay.
The next token is a pure function of the tokens so far, so any fake continues any request in the same way, and
`expected_tokens` tells what an undisturbed run gives. Hooks (`die`, `refuse`, `stall`, `fail_transfer`, ...) play
the misfortunes of a real worker.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvrelay.core.handoff import KvIdentity, KvShard
from kvrelay.core.ids import Incarnation, WorkerId
from kvrelay.core.placement import Role, WorkerRecord
from kvrelay.pb import common_pb2, worker_pb2, worker_pb2_grpc
from kvrelay.worker.fake_leg import FakeFabric, FakeLeg, FakeLink, NextToken, expected_tokens, letters

__all__ = ["FAKE_IDENTITY", "FAKE_SHARD", "FakeFabric", "FakeWorker", "NextToken", "expected_tokens", "letters"]

FAKE_IDENTITY = KvIdentity(
    model="fake", rope="none", tokenizer="bytes", num_layers=2, num_kv_heads=2, head_dim=16, block_size=16
)
FAKE_SHARD = KvShard(layer_begin=0, layer_end=2, head_begin=0, head_end=2, dtype="float32")


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """`await start()` → record; `await stop()`. Everything happens on the event loop that started it."""

    def __init__(
        self, role: Role, fabric: FakeFabric | None = None, *, worker_id: str = "", num_blocks: int = 256,
        max_context: int = 4096, identity: KvIdentity = FAKE_IDENTITY, served_name: str = "fake",
        next_token: NextToken = letters, eos_token_ids: frozenset[int] = frozenset(), step_s: float = 0.0,
        beat_s: float = 0.25,
    ) -> None:
        self.fabric = fabric or FakeFabric()
        self.next_token = next_token
        self.eos_token_ids = eos_token_ids
        self.step_s = step_s
        """How long a step takes. Change it at any time."""
        self.num_held = 0
        self.engine_age_ms = 0.0
        self.silent = False
        """True: no beats and no events any more, though the stream stays up."""
        self.starts: list[worker_pb2.Start] = []
        self.cancels: list[worker_pb2.Cancel] = []
        self._role = role
        self._worker_id = WorkerId(worker_id or f"{role.value}-{uuid.uuid4().hex[:6]}")
        self._num_blocks = num_blocks
        self.max_context = max_context
        self._identity = identity
        self._served_name = served_name
        self._beat_s = beat_s
        self._links: list[FakeLink] = []
        self._gate = asyncio.Event()
        self._gate.set()
        self._refusals: list[worker_pb2.Refused] = []
        self._transfer_failures = 0
        self._draining = False
        self._server: Any = None
        self.record: WorkerRecord | None = None

    @property
    def block_size(self) -> int:
        return self._identity.block_size

    @property
    def num_open(self) -> int:
        """Starts being worked on."""
        return sum(len(legs) for link in self._links for legs in link.legs.values())

    async def start(self, port: int = 0) -> WorkerRecord:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        self.record = WorkerRecord(
            self._worker_id, Incarnation(uuid.uuid4().hex), self._role, address, address, self._served_name,
            self._identity, FAKE_SHARD, self._num_blocks, self.max_context,
        )
        await self._server.start()
        return self.record

    async def stop(self) -> None:
        await self.die()

    async def die(self) -> None:
        """Ends every stream: as sudden as a kill for whoever is attached."""
        for link in self._links:
            link.closed = True
            for legs in list(link.legs.values()):
                for leg in legs:
                    leg.task.cancel()
        await self._server.stop(None)

    def refuse(self, reason: str = "no_room", *, times: int = 1, retry_after_ms: int = 100) -> None:
        """The next `times` Starts are refused."""
        refusal = worker_pb2.Refused(reason=reason, message=f"told to: {reason}", retry_after_ms=retry_after_ms)
        self._refusals += [refusal] * times

    def stall(self) -> None:
        """No step ends until `resume`. Beats go on."""
        self._gate.clear()

    def resume(self) -> None:
        self._gate.set()

    def drain(self) -> None:
        self._draining = True

    def fail_transfer(self, times: int = 1) -> None:
        """The next `times` pushes from this worker break; both sides say so."""
        self._transfer_failures += times

    def fail_all(self, reason: str = "engine", message: str = "the engine died") -> None:
        """Every sequence fails, as when the engine thread dies; the streams stay up."""
        for link in self._links:
            for legs in list(link.legs.values()):
                for leg in list(legs):
                    for choice in list(leg.open):
                        leg.fail(choice, reason, message)
                    leg.task.cancel()

    async def step(self) -> None:
        await self._gate.wait()
        await asyncio.sleep(self.step_s)
        await self._gate.wait()

    def refusal_for(self, start: worker_pb2.Start, num_blocks: int) -> worker_pb2.Refused | None:
        if self._refusals:
            return self._refusals.pop(0)
        if self._draining:
            return worker_pb2.Refused(reason="draining", message="this worker is draining")
        if not start.replay and self.num_held + num_blocks > self._num_blocks:
            return worker_pb2.Refused(reason="no_room", message="no blocks", retry_after_ms=100)
        return None

    def take_transfer_failure(self) -> bool:
        if self._transfer_failures == 0:
            return False
        self._transfer_failures -= 1
        return True

    def receiver(self) -> common_pb2.Receiver:
        record = self._own_record()
        return common_pb2.Receiver(
            worker_id=record.worker_id, incarnation=record.incarnation, address=record.push_address,
            shard=_shard_message(record.shard),
        )

    def load(self) -> worker_pb2.Load:
        held = min(self.num_held, self._num_blocks)
        return worker_pb2.Load(
            num_blocks=self._num_blocks, num_free=self._num_blocks - held, num_held=held, num_running=self.num_open,
            prefill_tokens_per_s=1000.0, step_ms=self.step_s * 1e3, engine_age_ms=self.engine_age_ms,
            draining=self._draining,
        )

    def forget(self, link: FakeLink, start: worker_pb2.Start, leg: FakeLeg) -> None:
        legs = link.legs.get((start.request_id, start.attempt), [])
        if leg in legs:
            legs.remove(leg)
        if not legs:
            link.legs.pop((start.request_id, start.attempt), None)

    async def Attach(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        link = FakeLink()
        self._links.append(link)
        reader: asyncio.Task[None] | None = None
        try:
            await anext(request_iterator, None)
            yield worker_pb2.WorkerMessage(welcome=self._welcome())
            reader = asyncio.create_task(self._read(link, request_iterator))
            async for message in self._messages(link, reader):
                yield message
        finally:
            link.closed = True
            for leg in [leg for legs in link.legs.values() for leg in legs]:
                leg.task.cancel()
            self._links.remove(link)
            if reader is not None:
                reader.cancel()

    async def _messages(self, link: FakeLink, reader: asyncio.Task[None]) -> AsyncIterator[worker_pb2.WorkerMessage]:
        while not reader.done():
            try:
                await asyncio.wait_for(link.wake.wait(), self._beat_s)
            except TimeoutError:
                if not self.silent:
                    yield worker_pb2.WorkerMessage(beat=self.load())
                continue
            link.wake.clear()
            events, link.events = link.events, []
            if not self.silent:
                yield worker_pb2.WorkerMessage(events=worker_pb2.Events(events=events, load=self.load()))

    async def _read(self, link: FakeLink, messages: AsyncIterator[Any]) -> None:
        async for message in messages:
            kind = message.WhichOneof("kind")
            if kind == "start":
                self.starts.append(message.start)
                key = (message.start.request_id, message.start.attempt)
                link.legs.setdefault(key, []).append(FakeLeg(self, link, message.start))
            elif kind == "cancel":
                self.cancels.append(message.cancel)
                for leg in list(link.legs.get((message.cancel.request_id, message.cancel.attempt), [])):
                    leg.cancel(message.cancel.choices)

    def _own_record(self) -> WorkerRecord:
        if self.record is None:
            raise RuntimeError("start() the worker first")
        return self.record

    def _welcome(self) -> worker_pb2.Welcome:
        record, identity = self._own_record(), self._identity
        return worker_pb2.Welcome(
            worker_id=record.worker_id, incarnation=record.incarnation, role=record.role.value, address=record.address,
            push_address=record.push_address, model=record.model, num_blocks=record.num_blocks,
            max_context=record.max_context, pid=record.pid, load=self.load(), shard=_shard_message(record.shard),
            identity=common_pb2.KvIdentity(
                model=identity.model, rope=identity.rope, tokenizer=identity.tokenizer,
                num_layers=identity.num_layers, num_kv_heads=identity.num_kv_heads, head_dim=identity.head_dim,
                block_size=identity.block_size, protocol=identity.protocol,
            ),
        )


def _shard_message(shard: KvShard) -> common_pb2.KvShard:
    return common_pb2.KvShard(
        layer_begin=shard.layer_begin, layer_end=shard.layer_end, head_begin=shard.head_begin,
        head_end=shard.head_end, dtype=shard.dtype, order=shard.order,
    )
