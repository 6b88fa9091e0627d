"""A whole worker without tensors, threads or sockets: the real engine and the real transfer desk around `FakeRunner`.

    engine ◀─ mailbox ─ desk ─▶ pipe ─▶ desk ─ mailbox ─▶ engine          all on one loop, in its time

KV is the runner's digests as bytes, so a block that was sent, landed or freed wrongly shows as a wrong token. Every
access of a transfer to a block is checked against the engine's books at that moment.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvrelay.core.clock import Clock
from kvrelay.core.config import EngineSettings, TransferSettings
from kvrelay.core.handoff import Commit, KvIdentity, KvShard, Receiver
from kvrelay.core.hashing import block_hash, root_hash
from kvrelay.core.ids import BlockHash, BlockId, Incarnation, TokenId, TransferId, WorkerId
from kvrelay.core.ports import EngineOutbox, Expected, Outgoing
from kvrelay.engine.engine import Engine
from kvrelay.engine.fakes import FakeRunner, digests
from kvrelay.engine.reservations import Stage
from kvrelay.engine.spec import EngineSpec
from kvrelay.transfer.desk import TransferDesk
from kvrelay.transfer.pipes import FrameStream, LoopbackPipe, Pipe
from kvrelay.transfer.words import Home, PushAnswer
from tests.support.empty import assert_worker_is_empty

BLOCK = 16
IDENTITY = KvIdentity(
    model="plant", rope="none", tokenizer="bytes", num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK
)
SHARD = KvShard(layer_begin=0, layer_end=1, head_begin=0, head_end=1, dtype="float32")
FINGERPRINT = "plant"
MAX_CONTEXT = 256


class RunnerKv:
    """`KvBytes` over a runner's digests: of each, the upper half is the slot's k and the lower half its v."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self.on_read: Callable[[Sequence[BlockId]], None] = lambda blocks: None
        self.on_write: Callable[[Sequence[BlockId]], None] = lambda blocks: None

    @property
    def shard(self) -> KvShard:
        return SHARD

    def gather(self, blocks: Sequence[BlockId], layer_begin: int, layer_end: int) -> bytes:
        self.on_read(blocks)
        out = []
        for block in blocks:
            values = [self._runner.kv.get((block, slot), 0) for slot in range(BLOCK)]
            out.append(struct.pack(f"<{2 * BLOCK}I", *(v >> 32 for v in values), *(v & 0xFFFFFFFF for v in values)))
        return b"".join(out)

    def scatter(
        self, blocks: Sequence[BlockId], layer_begin: int, layer_end: int, head_begin: int, head_end: int,
        payload: bytes | memoryview, dtype: str,
    ) -> None:
        self.on_write(blocks)
        for block, words in zip(blocks, struct.iter_unpack(f"<{2 * BLOCK}I", payload), strict=True):
            for slot in range(BLOCK):
                self._runner.kv[block, slot] = words[slot] << 32 | words[BLOCK + slot]


@dataclass
class _Posted:
    """`TransferPort` that posts to the desk, as the hub does from the engine's thread."""

    loop: asyncio.AbstractEventLoop
    desk: TransferDesk | None = None

    def _post(self, name: str, *args: object) -> None:
        self.loop.call_soon(getattr(self.desk, name), *args)

    def expect(self, expected: Expected) -> None:
        self._post("expect", expected)

    def close(self, transfer_id: TransferId) -> None:
        self._post("close", transfer_id)

    def send(self, outgoing: Outgoing) -> None:
        self._post("send", outgoing)

    def progress(self, transfer_id: TransferId, num_computed: int) -> None:
        self._post("progress", transfer_id, num_computed)

    def finish(self, transfer_id: TransferId, commit: Commit) -> None:
        self._post("finish", transfer_id, commit)

    def abort_send(self, transfer_id: TransferId) -> None:
        self._post("abort_send", transfer_id)


class Plant:
    """One life of one worker. Dies with `die`; whoever comes after it under the same name is another `Plant`."""

    def __init__(
        self, name: str, outbox: EngineOutbox, clock: Clock, *, door: LoopbackPipe, pipe: Pipe | None = None,
        life: int = 1, num_blocks: int = 64, wrap: Callable[[FrameStream], FrameStream] = lambda stream: stream,
        **settings: Any,
    ) -> None:
        self.worker_id, self.incarnation = WorkerId(name), Incarnation(f"{name}#{life}")
        self.violations: list[str] = []
        self.runner = FakeRunner(BLOCK)
        self.spec = EngineSpec(num_blocks, BLOCK, MAX_CONTEXT, frozenset(), FINGERPRINT, "float32", 256)
        port = _Posted(asyncio.get_running_loop())
        self.engine = Engine(replace(EngineSettings(), **settings), self.spec, self.runner, port, outbox, clock)
        self.kv = RunnerKv(self.runner)
        self.kv.on_read, self.kv.on_write = self._may_read, self._may_write
        home = Home(self.worker_id, self.incarnation, IDENTITY, self.kv)
        self.desk = port.desk = TransferDesk(TransferSettings(), home, self.engine, pipe or door)
        self._door, self._address, self._wrap = door, f"{name}-push", wrap
        self._serving: set[asyncio.Task[Any]] = set()
        door.listen(self._address, self._accept)

    @property
    def receiver(self) -> Receiver:
        return Receiver(self.worker_id, self.incarnation, self._address, SHARD)

    def die(self) -> None:
        """Mid-sentence: its Pushes break on both sides, and nobody steps its engine any more."""
        self._door.leave(self._address)
        for task in self._serving:
            task.cancel()
        for departure in list(self.desk._sending._live.values()):
            departure.abort("died")

    def check(self) -> None:
        """The books agree, and no transfer touched what was not lent to it."""
        pool = self.engine.cache.pool
        pool.check()
        assert pool.num_free + pool.num_cached + pool.num_held + pool.num_draining == pool.num_blocks
        assert self.violations == []

    def check_matchable(self, known: dict[BlockHash, list[int]]) -> None:
        """What the prefix index offers holds what its name says. `known`: the digests of every block there may be."""
        for content, block in self.engine.cache.pool.index._block_of.items():
            assert [self.runner.kv.get((block, slot)) for slot in range(BLOCK)] == known[content], (block, content)

    def assert_empty(self) -> None:
        assert_worker_is_empty(self.engine)
        assert self.desk.is_empty
        assert self.violations == []

    async def _accept(self, stream: FrameStream) -> PushAnswer:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return await self.desk.receive(self._wrap(stream))

    def _may_write(self, blocks: Sequence[BlockId]) -> None:
        reservations = self.engine.work.reservations._open.values()
        lent = {block for each in reservations if each.stage is not Stage.LANDED for block in each.blocks}
        self.violations += [f"wrote block {block}" for block in blocks if block not in lent]

    def _may_read(self, blocks: Sequence[BlockId]) -> None:
        lent = {block for each in self.engine.work.sendings._open.values() for block in each.blocks}
        self.violations += [f"read block {block}" for block in blocks if block not in lent]


def blocks_of(tokens: Sequence[TokenId], salt: bytes = b"") -> dict[BlockHash, list[int]]:
    """Name and content of every full block of a sequence."""
    parent, values, found = root_hash(salt, FINGERPRINT, "float32"), digests(tokens), {}
    for begin in range(0, len(tokens) - BLOCK + 1, BLOCK):
        parent = block_hash(parent, tokens[begin : begin + BLOCK])
        found[parent] = values[begin : begin + BLOCK]
    return found
