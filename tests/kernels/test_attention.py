"""The CPU attention equals the reference on every mix of lengths, and nothing stale ever leaks in."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvrelay_kernels.dispatch import CPU, REFERENCE, Ops
from kvrelay_kernels.paged_attention.batch import AttentionBatch

NUM_LAYERS, NUM_BLOCKS = 2, 40
LENGTHS = st.integers(0, 70).flatmap(lambda kv: st.tuples(st.integers(1, max(1, kv)), st.just(kv)))
"""(query_len, kv_len)."""


def poisoned_cache(kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """The second layer's view of a pool whose every element is NaN."""
    pool = torch.full((NUM_BLOCKS, NUM_LAYERS, 2, kv_heads, block_size, head_dim), math.nan, dtype=dtype)
    return pool[:, 1]


def fill(cache: Tensor, block_table: Tensor, kv_len: int, generator: torch.Generator) -> None:
    kv_heads, block_size, head_dim = cache.shape[2:]
    table = block_table.tolist()
    slots = torch.tensor(
        [table[i // block_size] * block_size + i % block_size for i in range(kv_len)], dtype=torch.int64
    )
    kv = torch.randn(kv_len, 2 * kv_heads, head_dim, generator=generator).to(cache.dtype)
    CPU.write_kv(kv, cache, CPU.plan_write(slots, cache))


def check(
    lengths: list[tuple[int, int]], *, kv_heads: int = 2, group: int = 2, head_dim: int = 16, block_size: int = 16,
    window: int = 0, dtype: torch.dtype = torch.float32, ops: Ops = CPU,
) -> Tensor:
    """lengths: (query_len, kv_len) per sequence."""
    generator = torch.Generator().manual_seed(0)
    cache = poisoned_cache(kv_heads, block_size, head_dim, dtype)
    width = max(1, max(-(-kv_len // block_size) for _, kv_len in lengths))
    free = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    tables = torch.zeros(len(lengths), width, dtype=torch.int64)
    for table, (_, kv_len) in zip(tables, lengths, strict=True):
        for i in range(-(-kv_len // block_size)):
            table[i] = free.pop()
        fill(cache, table, kv_len, generator)
    batch = AttentionBatch(
        tuple(query for query, _ in lengths), tuple(kv for _, kv in lengths), tables, head_dim**-0.5, window
    )
    heads = kv_heads * group
    q = torch.randn(batch.num_queries, heads, head_dim, generator=generator).to(dtype)
    got = ops.paged_attention(q, cache, ops.plan_attention(batch, cache, heads))
    expected = REFERENCE.paged_attention(q, cache, REFERENCE.plan_attention(batch, cache, heads))
    assert not expected.isnan().any()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 96, 112, 128, 160, 192, 256])
def test_every_head_dim_and_boundary(head_dim: int, dtype: torch.dtype) -> None:
    """KRN-02. NaN lies in every slot that is nobody's."""
    for lengths in ([(1, n) for n in (1, 15, 16, 17, 63, 64, 65, 127)], [(15, 17), (1, 3), (64, 65), (127, 127)]):
        check(lengths, head_dim=head_dim, dtype=dtype)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 7]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([0, 1, 5, 16, 33, 1000]),
)
def test_any_mix(lengths: list[tuple[int, int]], kv_heads: int, group: int, block_size: int, window: int) -> None:
    while sum(-(-kv // block_size) for _, kv in lengths) > NUM_BLOCKS:
        lengths = [(min(query, max(1, kv // 2)), kv // 2) for query, kv in lengths]
    check(lengths, kv_heads=kv_heads, group=group, block_size=block_size, window=window)


def test_rows_that_see_nothing_give_zero() -> None:
    """KRN-04: an empty context, alone and beside others, for one query row and for several."""
    got = check([(1, 0), (1, 5), (3, 0), (4, 2)])
    assert got[0].abs().max() == 0
    assert got[2:5].abs().max() == 0
    assert got[5:7].abs().max() == 0  # four rows, two keys: the first two rows come before every key
    assert got[7].abs().max() > 0


def test_very_negative_scores_still_normalise() -> None:
    cache = torch.zeros(2, 2, 1, 16, 16)
    cache[1, 0] = -1e4
    cache[1, 1] = 3.0
    batch = AttentionBatch((1,), (7,), torch.tensor([[1]]), 1.0)
    q = torch.full((1, 1, 16), 10.0)
    got = CPU.paged_attention(q, cache, CPU.plan_attention(batch, cache, 1))
    torch.testing.assert_close(got, torch.full_like(got, 3.0))


def test_a_row_has_the_same_bits_among_any_neighbours() -> None:
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(NUM_BLOCKS, 2, 2, 16, 16, generator=generator)
    q = torch.randn(3, 4, 16, generator=generator)
    tables = torch.arange(30).view(3, 10)

    def attend(seqs: list[int]) -> Tensor:
        lens = [7, 33, 160]
        batch = AttentionBatch((1,) * len(seqs), tuple(lens[i] for i in seqs), tables[seqs], 0.25)
        return CPU.paged_attention(q[seqs], cache, CPU.plan_attention(batch, cache, 4))

    together = attend([0, 1, 2])
    for i in range(3):
        assert torch.equal(attend([i])[0], together[i])


def test_block_ids_past_two_gigabytes() -> None:
    """KRN-01: offsets of a big pool do not fit 32 bits. The pool is virtual memory, touched at three blocks only."""
    import numpy as np

    block = 2 * 4 * 16 * 128  # elements
    num_blocks = 2**31 // block + 3
    cache = torch.from_numpy(np.zeros((num_blocks, 2, 4, 16, 128), dtype=np.float16))
    kv = torch.ones(3, 8, 128, dtype=torch.float16) * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16)[:, None, None]
    edge = 2**31 // block
    blocks = torch.tensor([edge - 1, edge, edge + 1])
    CPU.write_kv(kv, cache, CPU.plan_write(blocks * 16, cache))
    assert cache[blocks, 0, 0, 0, 0].tolist() == [1.0, 2.0, 3.0]
    batch = AttentionBatch((1, 1, 1), (1, 1, 1), blocks[:, None], 1.0)
    q = torch.ones(3, 4, 128, dtype=torch.float16)
    got = CPU.paged_attention(q, cache, CPU.plan_attention(batch, cache, 4))
    assert got[:, 0, 0].tolist() == [1.0, 2.0, 3.0]
