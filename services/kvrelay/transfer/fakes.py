"""Stand-ins at both seams of a transfer: a KV pool that watches its blocks, and an engine that takes notes."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvrelay.core.handoff import Commit, KvIdentity, KvShard
from kvrelay.core.ids import BlockId, SeqKey, TransferId
from kvrelay.core.kv import DTYPE_BYTES
from kvrelay.core.request import Migrate, Start

POISON = 0xA5
_FORMATS = {"float32": "f", "float16": "e"}


class FakeKv:
    """`KvBytes` on one bytearray, poisoned at first. Remembers who touched a block that was not lent any more."""

    def __init__(self, identity: KvIdentity, shard: KvShard, num_blocks: int) -> None:
        self._shard = shard
        self._num_heads = shard.head_end - shard.head_begin
        self._tile_bytes = identity.block_size * identity.head_dim * DTYPE_BYTES[shard.dtype]
        self._layer_bytes = 2 * self._num_heads * self._tile_bytes
        self.block_bytes = (shard.layer_end - shard.layer_begin) * self._layer_bytes
        self._bytes = bytearray([POISON]) * (num_blocks * self.block_bytes)
        self._locked: set[BlockId] = set()
        self.violations: list[str] = []
        """Reads and writes of locked blocks, in words."""
        self.num_writes = 0
        self.on_write: Callable[[], None] = lambda: None

    @property
    def shard(self) -> KvShard:
        return self._shard

    def block(self, block: BlockId) -> bytes:
        return bytes(self._bytes[block * self.block_bytes : (block + 1) * self.block_bytes])

    def fill(self, block: BlockId, content: bytes) -> None:
        """As the model would: content repeated to the block's size."""
        whole = (content * (self.block_bytes // len(content) + 1))[: self.block_bytes]
        self._bytes[block * self.block_bytes : (block + 1) * self.block_bytes] = whole

    def is_poisoned(self, block: BlockId) -> bool:
        return self.block(block) == bytes([POISON]) * self.block_bytes

    def lock(self, blocks: Iterable[BlockId]) -> None:
        """From now on the transfer side has no business in these blocks."""
        self._locked.update(blocks)

    def unlock(self, blocks: Iterable[BlockId]) -> None:
        self._locked.difference_update(blocks)

    def gather(self, blocks: Sequence[BlockId], layer_begin: int, layer_end: int) -> bytes:
        self._note("read", blocks)
        begin, end = self._layer_offset(layer_begin), self._layer_offset(layer_end)
        return b"".join(self.block(block)[begin:end] for block in blocks)

    def scatter(
        self,
        blocks: Sequence[BlockId],
        layer_begin: int,
        layer_end: int,
        head_begin: int,
        head_end: int,
        payload: bytes | memoryview,
        dtype: str,
    ) -> None:
        self._note("wrote", blocks)
        self.num_writes += 1
        converted = _convert(bytes(payload), dtype, self._shard.dtype)
        row_bytes = (head_end - head_begin) * self._tile_bytes
        head_offset = (head_begin - self._shard.head_begin) * self._tile_bytes
        source = 0
        for block in blocks:
            for layer in range(layer_begin, layer_end):
                for side in (0, 1):
                    target = block * self.block_bytes + self._layer_offset(layer) + head_offset
                    target += side * self._num_heads * self._tile_bytes
                    self._bytes[target : target + row_bytes] = converted[source : source + row_bytes]
                    source += row_bytes
        if source != len(converted):
            raise ValueError(f"a payload of {len(converted)} bytes for {source} bytes of blocks")
        self.on_write()

    def _layer_offset(self, layer: int) -> int:
        return (layer - self._shard.layer_begin) * self._layer_bytes

    def _note(self, verb: str, blocks: Sequence[BlockId]) -> None:
        self.violations.extend(f"{verb} block {block}" for block in blocks if block in self._locked)


def _convert(payload: bytes, source: str, target: str) -> bytes:
    if source == target:
        return payload
    count = len(payload) // DTYPE_BYTES[source]
    values = struct.unpack(f"<{count}{_FORMATS[source]}", payload)
    return struct.pack(f"<{count}{_FORMATS[target]}", *values)


@dataclass
class FakeInbox:
    """`EngineInbox` that takes notes from any thread and replies as told: at once, or when the test says so."""

    answer: bool | None = True
    """What a landing is told at once; None holds the reply for `reply`."""
    on_push_ended: Callable[[TransferId], None] = lambda _: None
    on_send_ended: Callable[[TransferId], None] = lambda _: None
    commits: dict[TransferId, list[Commit]] = field(default_factory=dict)
    push_errors: dict[TransferId, list[str]] = field(default_factory=dict)
    send_errors: dict[TransferId, list[str]] = field(default_factory=dict)
    levels: list[TransferId] = field(default_factory=list)
    held: dict[TransferId, Callable[[bool], None]] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def landed(self, transfer_id: TransferId, commit: Commit, reply: Callable[[bool], None]) -> None:
        with self._changed:
            self.commits.setdefault(transfer_id, []).append(commit)
            self.held[transfer_id] = reply
            self._changed.notify_all()
        if self.answer is not None:
            self.reply(transfer_id, self.answer)

    def reply(self, transfer_id: TransferId, runs: bool) -> None:
        self.held.pop(transfer_id)(runs)

    def push_ended(self, transfer_id: TransferId, error: str) -> None:
        with self._changed:
            self.push_errors.setdefault(transfer_id, []).append(error)
            self.on_push_ended(transfer_id)
            self._changed.notify_all()

    def send_ended(self, transfer_id: TransferId, error: str) -> None:
        with self._changed:
            self.send_errors.setdefault(transfer_id, []).append(error)
            self.on_send_ended(transfer_id)
            self._changed.notify_all()

    def wait_until(self, happened: Callable[[], bool], timeout_s: float = 20.0) -> bool:
        """For tests whose transfer loop runs on another thread."""
        with self._changed:
            return self._changed.wait_for(happened, timeout_s)

    def submit(self, start: Start) -> None:
        raise NotImplementedError("a transfer starts nothing")

    def cancel(self, key: SeqKey) -> None:
        raise NotImplementedError("a transfer cancels nothing")

    def migrate(self, migrate: Migrate) -> None:
        raise NotImplementedError("a transfer moves nothing of its own accord")

    def send_level(self, transfer_id: TransferId) -> None:
        with self._changed:
            self.levels.append(transfer_id)
            self._changed.notify_all()

    def drain(self) -> None:
        raise NotImplementedError("a transfer drains nothing")
