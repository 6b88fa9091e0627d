"""The small operators: each CPU twin equals its reference, on uneven shapes and in both dtypes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvrelay_kernels.dispatch import CPU, REFERENCE, best_native, cpu_ops, ops_for

DTYPES = [torch.float32, torch.bfloat16]


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 2e-2


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 17])
def test_linear(rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = noise(rows, 50, dtype=dtype), noise(33, 50, dtype=dtype, seed=1) / 7, noise(33, dtype=dtype)
    for term in (None, bias):
        expected = REFERENCE.linear(x, REFERENCE.pack(weight), term)
        torch.testing.assert_close(CPU.linear(x, CPU.pack(weight), term), expected, atol=tolerance(dtype), rtol=1e-2)


def test_a_row_of_linear_has_the_same_bits_among_any_neighbours() -> None:
    for outputs, inputs in ((96, 64), (64, 128), (320, 64), (130, 576)):
        packed, x = CPU.pack(noise(outputs, inputs)), noise(200, inputs, seed=2)
        expected = CPU.linear(x, packed, None)
        for count in (1, 2, 3, 4, 7, 16, 33, 64, 129):
            assert torch.equal(CPU.linear(x[:count], packed, None), expected[:count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    x, residual, weight = noise(5, 48, dtype=dtype), noise(5, 48, dtype=dtype, seed=1), noise(48, dtype=dtype, seed=2)
    torch.testing.assert_close(
        CPU.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5), atol=tolerance(dtype), rtol=1e-2
    )
    expected, expected_sum = REFERENCE.add_rms_norm(x, residual, weight, 1e-5)
    got, total = CPU.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert torch.equal(total, expected_sum)
    torch.testing.assert_close(got, expected, atol=tolerance(dtype), rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    gate_up = noise(5, 2 * 37, dtype=dtype)
    torch.testing.assert_close(
        CPU.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up), atol=tolerance(dtype), rtol=1e-2
    )


def test_rotary_turns_pairs_and_keeps_lengths() -> None:
    x, angle = noise(3, 2, 8), torch.tensor([0.0, 1.0, 2.0])[:, None] * torch.ones(4)
    cos = torch.cat((angle.cos(), angle.cos()), dim=-1)[:, None]
    sin = torch.cat((-angle.sin(), angle.sin()), dim=-1)[:, None]
    turned = x.clone()
    CPU.rotary_(turned, cos, sin)
    assert torch.equal(turned[0], x[0])
    torch.testing.assert_close(turned[1, 0, 0], x[1, 0, 0] * angle[1, 0].cos() - x[1, 0, 4] * angle[1, 0].sin())
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 6 * 4 - 1), unique=True, min_size=1), st.sampled_from(DTYPES))
def test_write_kv(slots: list[int], dtype: torch.dtype) -> None:
    caches = [torch.zeros(6, 3, 2, 2, 4, 8, dtype=dtype)[:, 1] for _ in range(2)]
    kv = noise(len(slots), 4, 8, dtype=dtype)
    for ops, cache in zip((CPU, REFERENCE), caches, strict=True):
        ops.write_kv(kv, cache, ops.plan_write(torch.tensor(slots), cache))
    assert torch.equal(*caches)


def test_copy_blocks() -> None:
    pool = torch.arange(40, dtype=torch.uint8).view(5, 8)
    before = pool.clone()
    CPU.copy_blocks(pool, torch.tensor([0, 3]), torch.tensor([4, 1]))
    assert torch.equal(pool[[4, 1]], before[[0, 3]])
    assert torch.equal(pool[[0, 2, 3]], before[[0, 2, 3]])


@pytest.mark.parametrize("pool_dtype", DTYPES)
@pytest.mark.parametrize("slab_dtype", DTYPES)
def test_gather_and_scatter(pool_dtype: torch.dtype, slab_dtype: torch.dtype) -> None:
    pools = [noise(7, 3, 2, 4, 10, dtype=pool_dtype) for _ in range(2)]
    blocks = torch.tensor([5, 0, 2])
    assert torch.equal(CPU.gather_blocks(pools[0], blocks, 1, 3), REFERENCE.gather_blocks(pools[0], blocks, 1, 3))
    slab = noise(3, 2, 2, 2, 10, dtype=slab_dtype, seed=9)
    for ops, pool in zip((CPU, REFERENCE), pools, strict=True):
        ops.scatter_blocks(pool, blocks, 1, 3, 1, 3, slab)
    assert torch.equal(*pools)
    assert torch.equal(pools[0][5, 2, 1, 2], slab[0, 1, 1, 1].to(pool_dtype))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.sampled_from([5, 600, 1500, 9000]),
    spread=st.sampled_from([0.1, 2.0, 8.0]),
    temperature=st.sampled_from([1e-3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 256, 400, 10_000]),
    top_p=st.sampled_from([1e-9, 0.3, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    number=st.floats(0.0, 1.0, exclude_max=True),
    ties=st.booleans(),
)
def test_draw(
    seed: int, size: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float, number: float,
    ties: bool,
) -> None:
    logits = noise(size, seed=seed) * spread
    if ties:
        logits = logits.round()
    token = CPU.draw(logits, temperature, top_k, top_p, min_p, number)
    assert token == REFERENCE.draw(logits, temperature, top_k, top_p, min_p, number)
    if top_k == 1 or top_p == 1e-9 or (min_p == 1.0 and not ties):
        assert logits[token] == logits.max()


def test_draw_follows_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf, -1.0])
    steps = 20_000
    tokens = torch.tensor([REFERENCE.draw(logits, 1.0, 0, 1.0, 0.0, i / steps) for i in range(0, steps, 10)])
    shares = torch.bincount(tokens, minlength=5) / len(tokens)
    torch.testing.assert_close(shares, torch.softmax(logits, 0), atol=2e-3, rtol=0)


def test_devices_have_a_set() -> None:
    cpu = torch.device("cpu")
    assert ops_for(cpu, torch.float32, 64) is (best_native() or CPU)
    assert ops_for(cpu, torch.float16, 64) is cpu_ops(torch.float16)
    assert ops_for(cpu, torch.float32, 12) is CPU
    assert ops_for(torch.device("cuda", 0)) is REFERENCE
