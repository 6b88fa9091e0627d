"""The baton: what a prefill worker and a decode worker must agree on before a byte of KV moves.

On the wire a block is "the i-th block of this sequence" (`first_block`, `num_blocks` below); block ids stay at home.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from kvrelay.core.events import Token
from kvrelay.core.ids import Attempt, BlockId, Choice, Incarnation, RequestId, TransferId, WorkerId

PROTOCOL_VERSION = 3
MAX_SLAB_BYTES = 1 << 20
"""One gRPC message of 1 MiB moves four times as fast over loopback as one of 4 MiB (measured)."""


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """What the numbers in a KV block mean. Must be equal on both sides; a difference is never retried on that pair."""

    model: str
    """Digest of the weights and the config that shapes them."""
    rope: str
    tokenizer: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    protocol: int = PROTOCOL_VERSION

    def fingerprint(self) -> str:
        text = "\n".join(f"{name}={value}" for name, value in sorted(asdict(self).items()))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def differences(self, other: KvIdentity) -> list[str]:
        """Human-readable `name: ours != theirs`, empty when equal."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{name}: {mine[name]} != {theirs[name]}" for name in mine if mine[name] != theirs[name]]


@dataclass(frozen=True, slots=True)
class KvShard:
    """Which part of every block one process holds and how its bytes are laid out. May differ; converted on the way."""

    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int
    dtype: str
    """"float32", "bfloat16", "float16", later "fp8_e4m3" and "int8"."""
    order: str = "plain"
    """Inner order of a (layer, k|v, head) tile: "plain" is `[slot, head_dim]`."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """Where one shard of a reservation can be pushed."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    """host:port of its KvTransfer service."""
    shard: KvShard
    handle: bytes = b""
    """Its leave to push into one reservation (`core/handles.py`)."""


@dataclass(frozen=True, slots=True)
class Handoff:
    transfer_id: TransferId
    receivers: tuple[Receiver, ...]
    num_cached_tokens: int
    """Leading tokens whose blocks the receiver holds already; a multiple of the block size."""


@dataclass(frozen=True, slots=True)
class PushOpen:
    """First frame of a Push: everything the receiver checks before it accepts a byte."""

    transfer_id: TransferId
    request_id: RequestId
    attempt: Attempt
    identity: KvIdentity
    shard: KvShard
    sender: WorkerId
    sender_incarnation: Incarnation
    receiver_incarnation: Incarnation
    first_block: int
    num_blocks: int
    """Blocks [first_block, first_block + num_blocks) of the sequence will travel."""
    checksum: str = "xxh3"
    tenant: bytes = b""
    """The salt of the tenant whose tokens the sender computed; the receiver has signed for one tenant."""
    handle: bytes = b""


@dataclass(frozen=True, slots=True)
class Slab:
    """A rectangle of KV: blocks × layers × heads, as contiguous bytes `[block, layer, k|v, head, slot, head_dim]`."""

    seq_no: int
    first_block: int
    num_blocks: int
    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int
    checksum: int
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True)
class ChoiceTokens:
    """Tokens drawn since `Start` for one choice, which the receiver appends before it goes on."""

    choice: Choice
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Last frame of a Push. Applied only if every block × layer × head arrived exactly once."""

    num_tokens: int
    """Tokens whose KV is complete on the receiver from now on (cached ones included)."""
    num_slabs: int
    choices: tuple[ChoiceTokens, ...]
    """Choices that go on. One that ended with its first token is not in here."""


class KvSource(Protocol):
    """Read access to one sending sequence's blocks, by position in the sequence. Valid until the send has ended."""

    @property
    def shard(self) -> KvShard: ...

    def read(self, first_block: int, num_blocks: int, layer_begin: int, layer_end: int) -> bytes | memoryview:
        """Contiguous `[block, layer, k|v, head, slot, head_dim]` bytes."""
        ...


class KvSink(Protocol):
    """Write access to one reservation's blocks, by position in the sequence. Valid until the Push has ended."""

    @property
    def shard(self) -> KvShard: ...

    def write(self, slab: Slab, sender: KvShard) -> None:
        """Scatter a *verified* slab into the reserved blocks, converting from the sender's shard if it differs."""
        ...


class KvBytes(Protocol):
    """The KV pool's bytes as `model.KvStorage` offers them: block ids in, bytes out. No ownership, no bookkeeping."""

    @property
    def shard(self) -> KvShard: ...

    def gather(self, blocks: Sequence[BlockId], layer_begin: int, layer_end: int) -> bytes | memoryview:
        """Contiguous copy `[block, layer, k|v, head, slot, head_dim]`."""
        ...

    def scatter(
        self, blocks: Sequence[BlockId], layer_begin: int, layer_end: int, head_begin: int, head_end: int,
        payload: bytes | memoryview, dtype: str,
    ) -> None:
        """Write a payload of that shape and dtype into the blocks, converting to the pool's dtype."""
        ...
