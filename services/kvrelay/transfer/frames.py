"""Cutting KV into slabs.

A slab is a rectangle of blocks × layers × heads of at most `MAX_SLAB_BYTES`, as contiguous bytes

    [block][layer][k|v][head][slot][head_dim]

As many whole blocks as fit; if one block is too large, groups of its layers; if one layer is, groups of its heads.
The unit is the tile: one (layer, k|v, head) of a block, `block_size × head_dim` elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from kvrelay.core.handoff import MAX_SLAB_BYTES, KvBytes, KvIdentity, KvShard, Slab
from kvrelay.core.ids import BlockId
from kvrelay.core.kv import DTYPE_BYTES
from kvrelay.transfer.words import PushFailed

CHECKSUM = "xxh3"


@dataclass(frozen=True, slots=True)
class Rectangle:
    first_block: int
    num_blocks: int
    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int

    def num_bytes(self, tile_bytes: int) -> int:
        num_layers, num_heads = self.layer_end - self.layer_begin, self.head_end - self.head_begin
        return self.num_blocks * num_layers * 2 * num_heads * tile_bytes


def rectangle_of(slab: Slab) -> Rectangle:
    return Rectangle(
        slab.first_block, slab.num_blocks, slab.layer_begin, slab.layer_end, slab.head_begin, slab.head_end
    )


def tile_bytes(identity: KvIdentity, dtype: str) -> int:
    """Raises PushFailed for a dtype that this version cannot convert."""
    if dtype not in DTYPE_BYTES:
        raise PushFailed(f"kv dtype {dtype!r} is none of {', '.join(DTYPE_BYTES)}", retryable=False)
    return identity.block_size * identity.head_dim * DTYPE_BYTES[dtype]


def checksum(payload: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(payload)


def contains(outer: KvShard, inner: KvShard) -> bool:
    return (
        outer.layer_begin <= inner.layer_begin
        and inner.layer_end <= outer.layer_end
        and outer.head_begin <= inner.head_begin
        and inner.head_end <= outer.head_end
    )


def cut(
    first_block: int, num_blocks: int, part: KvShard, tile_bytes: int, max_bytes: int = MAX_SLAB_BYTES
) -> Iterator[Rectangle]:
    """Blocks [first_block, first_block + num_blocks) of `part`'s layers and heads, each exactly once."""
    num_layers, num_heads = part.layer_end - part.layer_begin, part.head_end - part.head_begin
    blocks_each = max(1, max_bytes // (num_layers * num_heads * 2 * tile_bytes))
    layers_each = min(num_layers, max(1, max_bytes // (num_heads * 2 * tile_bytes)))
    heads_each = min(num_heads, max(1, max_bytes // (2 * tile_bytes)))
    end = first_block + num_blocks
    for block in range(first_block, end, blocks_each):
        for layer in range(part.layer_begin, part.layer_end, layers_each):
            for head in range(part.head_begin, part.head_end, heads_each):
                yield Rectangle(
                    first_block=block,
                    num_blocks=min(blocks_each, end - block),
                    layer_begin=layer,
                    layer_end=min(layer + layers_each, part.layer_end),
                    head_begin=head,
                    head_end=min(head + heads_each, part.head_end),
                )


def read_slab(kv: KvBytes, blocks: Sequence[BlockId], rectangle: Rectangle, seq_no: int, tile_bytes: int) -> Slab:
    """Copy one rectangle out of the pool. `blocks` are the whole sequence's."""
    block_ids = blocks[rectangle.first_block : rectangle.first_block + rectangle.num_blocks]
    payload = kv.gather(block_ids, rectangle.layer_begin, rectangle.layer_end)
    whole = (kv.shard.head_begin, kv.shard.head_end)
    if (rectangle.head_begin, rectangle.head_end) != whole:
        payload = _take_heads(payload, rectangle, kv.shard, tile_bytes)
    return Slab(
        seq_no=seq_no,
        first_block=rectangle.first_block,
        num_blocks=rectangle.num_blocks,
        layer_begin=rectangle.layer_begin,
        layer_end=rectangle.layer_end,
        head_begin=rectangle.head_begin,
        head_end=rectangle.head_end,
        checksum=checksum(payload),
        payload=payload,
    )


def _take_heads(payload: bytes | memoryview, rectangle: Rectangle, shard: KvShard, tile_bytes: int) -> bytes:
    """Rows of all the shard's heads in, rows of the rectangle's heads out."""
    view = memoryview(payload).cast("B")
    row_bytes = (shard.head_end - shard.head_begin) * tile_bytes
    begin = (rectangle.head_begin - shard.head_begin) * tile_bytes
    end = (rectangle.head_end - shard.head_begin) * tile_bytes
    return b"".join(view[row + begin : row + end] for row in range(0, len(view), row_bytes))
