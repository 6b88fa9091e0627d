"""The pool's bytes: what is gathered from one process and scattered into another is the same KV."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.core.errors import Broken
from kvrelay.core.handoff import KvBytes, KvShard
from kvrelay.core.ids import BlockId
from kvrelay.core.kv import KvLayout
from kvrelay.model.storage import DTYPES, KvStorage, capacity_line
from kvrelay_kernels.dispatch import CPU

NUM_BLOCKS = 9


def storage(dtype: str = "float32", seed: int | None = None, heads: int = 2) -> KvStorage:
    made = KvStorage(KvLayout(3, heads, 4, 2, dtype), NUM_BLOCKS, torch.device("cpu"), CPU)
    if seed is not None:
        for i, layer in enumerate(made.layers):
            layer.copy_(torch.randn(layer.shape, generator=torch.Generator().manual_seed(seed + i)))
    return made


def ids(*blocks: int) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


def test_a_block_is_one_span_in_the_order_of_the_design() -> None:
    pool = storage("bfloat16")
    pool.layers[1][4, 1, 0, 1, 2] = 1.0  # layer 1, block 4, v, head 0, slot 1, dimension 2
    flat = pool.pool[4].view(torch.bfloat16)
    assert flat.nonzero().item() == (((1 * 2 + 1) * 2 + 0) * 2 + 1) * 4 + 2
    assert pool.pool.shape == (NUM_BLOCKS, pool.layout.block_bytes)
    as_seam: KvBytes = pool
    assert as_seam.shard == KvShard(0, 3, 0, 2, "bfloat16")


BLOCKS = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=6, unique=True)


@settings(max_examples=60, deadline=None)
@given(
    source_blocks=BLOCKS,
    data=st.data(),
    layers=st.tuples(st.integers(0, 2), st.integers(1, 3)).filter(lambda pair: pair[0] < pair[1]),
    source_dtype=st.sampled_from(sorted(DTYPES)),
    target_dtype=st.sampled_from(sorted(DTYPES)),
)
def test_gather_then_scatter(
    source_blocks: list[int], data: st.DataObject, layers: tuple[int, int], source_dtype: str, target_dtype: str
) -> None:
    size = len(source_blocks)
    target_blocks = data.draw(
        st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=size, max_size=size, unique=True), label="target blocks"
    )
    source, target = storage(source_dtype, seed=0), storage(target_dtype, seed=100)
    before = target.pool.clone()
    payload = source.gather(ids(*source_blocks), *layers)
    assert len(payload) == size * (layers[1] - layers[0]) * source.layout.layer_bytes
    target.scatter(ids(*target_blocks), *layers, 0, 2, bytes(payload), source_dtype)
    for layer in range(*layers):
        expected = source.layers[layer][source_blocks].to(DTYPES[target_dtype])
        assert torch.equal(target.layers[layer][target_blocks], expected)
    untouched = [block for block in range(NUM_BLOCKS) if block not in target_blocks]
    assert torch.equal(target.pool[untouched], before[untouched])
    outside = [layer for layer in range(3) if not layers[0] <= layer < layers[1]]
    rest = storage(target_dtype, seed=100)
    assert all(torch.equal(target.layers[layer], rest.layers[layer]) for layer in outside)


def test_heads_of_two_senders_meet_in_one_block() -> None:
    """A receiver with four heads, filled by two senders with two heads each."""
    low, high, target = storage(seed=1), storage(seed=2), storage(heads=4)
    for sender, begin in ((low, 0), (high, 2)):
        target.scatter(ids(5), 0, 3, begin, begin + 2, sender.gather(ids(3), 0, 3), "float32")
    for layer in range(3):
        assert torch.equal(target.layers[layer][5, :, :2], low.layers[layer][3])
        assert torch.equal(target.layers[layer][5, :, 2:], high.layers[layer][3])


def test_gathered_bytes_are_a_copy() -> None:
    pool = storage(seed=3)
    payload = bytes(pool.gather(ids(2), 0, 3))
    view = pool.gather(ids(2), 0, 3)
    pool.layers[0][2] = 0.0
    assert bytes(view) == payload


def test_copy_forks_a_block() -> None:
    pool = storage(seed=4)
    pool.copy(ids(1, 2), ids(7, 8))
    assert torch.equal(pool.pool[[7, 8]], pool.pool[[1, 2]])


def test_a_slab_of_the_wrong_size_is_refused_whole() -> None:
    pool = storage(seed=5)
    before = pool.pool.clone()
    payload = bytes(pool.gather(ids(1), 0, 3))
    with pytest.raises(Broken, match="bytes, not"):
        pool.scatter(ids(1), 0, 3, 0, 2, payload[:-1], "float32")
    with pytest.raises(Broken, match="int8"):
        pool.scatter(ids(1), 0, 3, 0, 2, payload, "int8")
    assert torch.equal(pool.pool, before)


def test_capacity_in_words() -> None:
    layout = KvLayout(2, 2, 16, 16, "float32")
    assert capacity_line(layout, 1000, 256) == "1,000 blocks, 16,000 tokens, 62 sessions at the model's context of 256"
    assert capacity_line(layout, 8, 256) == "8 blocks, 128 tokens, 0.5 sessions at the model's context of 256"
