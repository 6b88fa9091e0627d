"""The C++ attention equals the reference, and a row's bits depend on its own sequence only."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay_kernels.dispatch import Ops
from kvrelay_kernels.paged_attention.batch import AttentionBatch
from tests.kernels.native_sets import DTYPES, SETS, native
from tests.kernels.test_attention import LENGTHS, check, fill, poisoned_cache


@pytest.fixture(scope="module", params=SETS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return native(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 24, 40, 64, 80, 96, 112, 128, 192, 256])
def test_every_head_dim_and_boundary(ops: Ops, head_dim: int, dtype: torch.dtype) -> None:
    for lengths in ([(1, n) for n in (1, 15, 16, 17, 63, 64, 65, 127)], [(15, 17), (1, 3), (64, 65), (127, 127)]):
        check(lengths, head_dim=head_dim, dtype=dtype, ops=ops)


@pytest.mark.parametrize(("kv_heads", "group"), [(3, 1), (3, 3), (2, 6), (1, 7), (2, 8), (1, 71), (1, 130)])
def test_every_group(ops: Ops, kv_heads: int, group: int) -> None:
    check([(1, 40), (9, 70), (3, 3)], kv_heads=kv_heads, group=group, ops=ops)


def test_rows_that_see_nothing_give_zero(ops: Ops) -> None:
    got = check([(2, 0), (1, 5), (1, 0)], ops=ops)
    assert got[:2].abs().max() == 0.0 == got[3].abs().max()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 7]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([0, 1, 5, 16, 33, 1000]),
)
def test_any_mix(
    ops: Ops, lengths: list[tuple[int, int]], kv_heads: int, group: int, block_size: int, window: int
) -> None:
    num_blocks = sum(-(-kv // block_size) for _, kv in lengths)
    if num_blocks <= 40:
        check(lengths, kv_heads=kv_heads, group=group, block_size=block_size, window=window, ops=ops)


@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_splits_and_threads_change_no_bit(ops: Ops, dtype: torch.dtype, window: int) -> None:
    """2,100 keys: five splits. Whole, in chunks, token by token at the end, one thread and three."""
    length, kv_heads, group, head_dim, block_size = 2100, 2, 3, 40, 64
    generator = torch.Generator().manual_seed(1)
    cache = poisoned_cache(kv_heads, block_size, head_dim, dtype)
    table = torch.randperm(40, generator=generator)[: -(-length // block_size)]
    fill(cache, table, length, generator)
    q = torch.randn(length, kv_heads * group, head_dim, generator=generator).to(dtype)

    def attend(begin: int, end: int) -> torch.Tensor:
        batch = AttentionBatch((end - begin,), (end,), table[None], head_dim**-0.5, window)
        return ops.paged_attention(q[begin:end], cache, ops.plan_attention(batch, cache, kv_heads * group))

    whole = attend(0, length)
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            for begin, end in ((0, 16), (500, 530), (1000, 1200), (511, 512), (2048, 2049), (2099, 2100)):
                assert torch.equal(attend(begin, end), whole[begin:end])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("scale", [1.0, 1e-38], ids=["", "denormal"])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 8), (2, 24), (3, 64), (5, 80), (6, 128), (7, 40), (8, 96)])
def test_a_few_rows_have_the_bits_of_many(ops: Ops, group: int, head_dim: int, scale: float) -> None:
    """One query and its group take another way through the processor than a chunk of them, where that pays."""
    length, block_size = 150, 16
    generator = torch.Generator().manual_seed(2)
    cache = poisoned_cache(1, block_size, head_dim, torch.bfloat16)
    table = torch.randperm(40, generator=generator)[: -(-length // block_size)]
    fill(cache, table, length, generator)
    cache *= scale
    q = (torch.randn(length, group, head_dim, generator=generator) / scale**0.5).bfloat16()

    def attend(begin: int, end: int) -> torch.Tensor:
        batch = AttentionBatch((end - begin,), (end,), table[None], head_dim**-0.5)
        return ops.paged_attention(q[begin:end], cache, ops.plan_attention(batch, cache, group))

    whole = attend(0, length)
    assert whole.isfinite().all()
    for begin, end in ((0, 1), (1, 2), (63, 64), (64, 65), (127, 129), (149, 150), (100, 103)):
        assert torch.equal(attend(begin, end), whole[begin:end])
