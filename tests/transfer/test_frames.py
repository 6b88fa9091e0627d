"""Cutting: small enough, everything once, and the right bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.core.handoff import KvShard, Slab
from kvrelay.core.ids import BlockId
from kvrelay.transfer.coverage import Coverage
from kvrelay.transfer.fakes import FakeKv
from kvrelay.transfer.frames import Rectangle, checksum, cut, read_slab, rectangle_of, tile_bytes
from kvrelay.transfer.words import PushFailed
from tests.transfer.world import IDENTITY, SHARD, block_ids, content

TILE = tile_bytes(IDENTITY, "float32")
small = st.integers(1, 5)


@st.composite
def shards(draw: st.DrawFn) -> KvShard:
    layer, head = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    return KvShard(layer, layer + draw(small), head, head + draw(small), "float32")


@settings(max_examples=100, deadline=None)
@given(shards(), st.integers(0, 4), st.integers(0, 9), st.integers(2, 200))
def test_a_cut_covers_everything_once_within_the_limit(shard: KvShard, first: int, count: int, tiles: int) -> None:
    coverage = Coverage(first, count, shard)
    for rectangle in cut(first, count, shard, TILE, max_bytes=tiles * TILE):
        assert rectangle.num_bytes(TILE) <= tiles * TILE
        coverage.check(rectangle)
        coverage.add(rectangle)
    assert coverage.num_incomplete == 0


def test_whole_blocks_travel_together_when_they_fit() -> None:
    block = 3 * 2 * 2 * TILE
    assert list(cut(2, 5, SHARD, TILE, max_bytes=2 * block + 1)) == [
        Rectangle(2, 2, 0, 3, 0, 2),
        Rectangle(4, 2, 0, 3, 0, 2),
        Rectangle(6, 1, 0, 3, 0, 2),
    ]


def test_a_large_block_is_split_by_layers_and_a_large_layer_by_heads() -> None:
    layer = 2 * 2 * TILE
    assert list(cut(0, 1, SHARD, TILE, max_bytes=2 * layer)) == [
        Rectangle(0, 1, 0, 2, 0, 2),
        Rectangle(0, 1, 2, 3, 0, 2),
    ]
    assert len(list(cut(0, 1, SHARD, TILE, max_bytes=layer - 1))) == 6


@pytest.mark.parametrize("max_bytes", [2 * TILE, 4 * TILE, 8 * TILE, 1 << 20])
def test_slabs_of_any_cut_rebuild_the_blocks(max_bytes: int) -> None:
    source, target = FakeKv(IDENTITY, SHARD, 8), FakeKv(IDENTITY, SHARD, 8)
    sequence, lent = block_ids([5, 2, 7]), block_ids([1, 6, 3])
    for block in sequence:
        source.fill(block, content(block))
    for seq_no, rectangle in enumerate(cut(0, 3, SHARD, TILE, max_bytes=max_bytes)):
        slab = read_slab(source, sequence, rectangle, seq_no, TILE)
        assert slab.checksum == checksum(slab.payload)
        blocks = lent[slab.first_block : slab.first_block + slab.num_blocks]
        layers, heads = (slab.layer_begin, slab.layer_end), (slab.head_begin, slab.head_end)
        target.scatter(blocks, *layers, *heads, slab.payload, "float32")
    assert [target.block(block) for block in lent] == [source.block(block) for block in sequence]
    assert target.is_poisoned(BlockId(0))


def test_a_dtype_without_a_size_is_not_sent() -> None:
    with pytest.raises(PushFailed, match="kv dtype 'int3'") as caught:
        tile_bytes(IDENTITY, "int3")
    assert not caught.value.retryable


RIGHT = Rectangle(2, 1, 0, 3, 0, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(RIGHT, first_block=1),
        replace(RIGHT, first_block=4),
        replace(RIGHT, num_blocks=0),
        replace(RIGHT, num_blocks=2**32 - 1),
        replace(RIGHT, layer_end=4),
        replace(RIGHT, layer_begin=3, layer_end=3),
        replace(RIGHT, head_end=2**32 - 1),
        replace(RIGHT, head_begin=1, head_end=1),
    ],
)
def test_a_slab_outside_of_the_reservation_is_an_error(wrong: Rectangle) -> None:
    coverage = Coverage(2, 2, SHARD)
    coverage.check(RIGHT)
    with pytest.raises(PushFailed, match="is outside"):
        coverage.check(wrong)


def test_any_overlap_is_an_error_and_nothing_missing_is_overlooked() -> None:
    coverage = Coverage(0, 1, SHARD)
    coverage.add(Rectangle(0, 1, 0, 2, 0, 2))
    with pytest.raises(PushFailed, match="arrived twice"):
        coverage.check(Rectangle(0, 1, 1, 3, 1, 2))
    coverage.add(Rectangle(0, 1, 2, 3, 0, 1))
    assert coverage.num_incomplete == 1
    coverage.add(Rectangle(0, 1, 2, 3, 1, 2))
    assert coverage.num_incomplete == 0


def test_a_rectangle_is_read_off_its_slab() -> None:
    slab = Slab(0, 2, 1, 0, 3, 0, 2, 0, b"")
    assert rectangle_of(slab) == RIGHT
