"""Every C++ operator equals its reference, on every instruction set of this machine, on uneven shapes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvrelay_kernels.dispatch import REFERENCE, Ops
from tests.kernels.native_sets import DTYPES, SETS, native
from tests.kernels.test_operators import noise, tolerance


@pytest.fixture(scope="module", params=SETS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return native(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (33, 50), (64, 64), (130, 200), (5, 31)])
def test_linear(ops: Ops, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = noise(*shape, dtype=dtype, seed=1) / 7, noise(shape[0], dtype=dtype)
    for rows in (1, 2, 7, 15, 16, 17, 33, 50):
        x = noise(rows, shape[1], dtype=dtype)
        for term in (None, bias):
            expected = REFERENCE.linear(x, REFERENCE.pack(weight), term)
            got = ops.linear(x, ops.pack(weight), term)
            torch.testing.assert_close(got, expected, atol=tolerance(dtype), rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_linear_has_the_same_bits_among_any_neighbours(ops: Ops, dtype: torch.dtype) -> None:
    for outputs, inputs in ((96, 64), (130, 576)):
        packed, x = ops.pack(noise(outputs, inputs, dtype=dtype)), noise(100, inputs, dtype=dtype, seed=2)
        expected = ops.linear(x, packed, None)
        for begin, count in ((0, 1), (3, 1), (5, 7), (0, 16), (11, 17), (0, 33), (1, 64)):
            assert torch.equal(ops.linear(x[begin : begin + count], packed, None), expected[begin : begin + count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(ops: Ops, dtype: torch.dtype) -> None:
    for size in (48, 8, 33, 576):
        x, residual = noise(5, size, dtype=dtype), noise(5, size, dtype=dtype, seed=1)
        weight = noise(size, dtype=dtype, seed=2)
        close(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5), dtype)
        expected, expected_sum = REFERENCE.add_rms_norm(x, residual, weight, 1e-5)
        got, total = ops.add_rms_norm(x, residual.clone(), weight, 1e-5)
        assert torch.equal(total, expected_sum)
        close(got, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(ops: Ops, dtype: torch.dtype) -> None:
    gate_up = noise(5, 2 * 37, dtype=dtype) * 30
    close(ops.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up), dtype)
    gate_up[0, 0] = math.nan
    assert math.isnan(float(ops.silu_and_mul(gate_up)[0, 0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 16, 40, 64, 80])
def test_rotary(ops: Ops, head_dim: int, dtype: torch.dtype) -> None:
    """The heads turned are part of a wider row, whose rest stays as it is."""
    angles = noise(3, head_dim // 2, seed=3)
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)[:, None]
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)[:, None]
    expected = noise(3, 5, head_dim, dtype=dtype)
    got = expected.clone()
    REFERENCE.rotary_(expected[:, :3], cos, sin)
    ops.rotary_(got[:, :3], cos, sin)
    close(got, expected, dtype)
    assert torch.equal(got[:, 3:], expected[:, 3:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_touches_its_slots_only(ops: Ops, dtype: torch.dtype) -> None:
    caches = [torch.zeros(6, 3, 2, 2, 4, 24, dtype=dtype)[:, 1] for _ in range(2)]
    kv, slots = noise(5, 7, 24, dtype=dtype)[:, 3:], torch.tensor([23, 0, 9, 10, 5])
    for each, cache in zip((ops, REFERENCE), caches, strict=True):
        each.write_kv(kv, cache, each.plan_write(slots, cache))
    assert torch.equal(*caches)


def test_greedy_takes_the_first_of_the_largest(ops: Ops) -> None:
    logits = noise(7, 1003)
    logits[1, 500] = logits[1, 7] = 50.0
    logits[2, 1002] = math.inf
    logits[3] = -math.inf
    logits[4, 17] = math.nan
    values, ids = ops.greedy(logits[:, :1003])
    expected_values, expected_ids = REFERENCE.greedy(logits)
    torch.testing.assert_close(values, expected_values, equal_nan=True, atol=0, rtol=0)
    assert ids.tolist() == expected_ids.tolist()
    narrow = ops.greedy(logits[:, :100])
    assert narrow[1].tolist() == REFERENCE.greedy(logits[:, :100])[1].tolist()


def close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got, expected, atol=tolerance(dtype), rtol=1e-5 if dtype == torch.float32 else 1e-2)
