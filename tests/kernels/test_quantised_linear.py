"""Linear layers over codes: the native sets multiply like panels of the numbers the codes stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvrelay_kernels.dispatch import CPU, REFERENCE, Ops, cpu_ops
from kvrelay_kernels.linear.quantised import QuantisedWeight, stack
from tests.kernels.codes import FORMATS, quantised
from tests.kernels.native_sets import DTYPES, SETS, native
from tests.kernels.test_operators import noise, tolerance

SHAPES = [(1, 32), (33, 64), (64, 576), (70, 1536), (96, 96)]
TILES = "native/amx_bf16"
"""Multiplies codes with bfloat16 and scales what comes out."""
PAIR_SETS = {TILES, "native/avx512_bf16"}
"""Multiply bfloat16 with bfloat16; the others float32 with float32."""


@pytest.fixture(scope="module", params=SETS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return native(request.param)


def as_numbers(ops: Ops, weight: QuantisedWeight) -> Tensor:
    numbers = weight.dequantise()
    return numbers.bfloat16() if ops.name in PAIR_SETS else numbers


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_multiply_like_the_numbers_they_stand_for(ops: Ops, shape: tuple[int, int], form: str) -> None:
    """No bit differs: scale · code + offset is one exact product and one rounding in either order.

    Tiles scale after they multiply, so there the order of sums differs, and nothing else: 1e-5 of sums of about ten.
    """
    weight, bias = quantised(form, *shape), noise(shape[0])
    packed, numbers = ops.pack(weight), ops.pack(as_numbers(ops, weight))
    x = noise(70, shape[1], seed=2)
    for rows in (1, 2, 7, 12, 16, 17, 32, 33, 64, 70):
        for term in (None, bias):
            got = ops.linear(x[:rows], packed, term)
            if ops.name == TILES:
                rounded = x[:rows].bfloat16().float()
                expected = REFERENCE.linear(rounded, REFERENCE.pack(weight), term)
                torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
            else:
                assert torch.equal(got, ops.linear(x[:rows], numbers, term))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("wide", [False, True])
def test_codes_equal_the_reference(ops: Ops, form: str, wide: bool, dtype: torch.dtype) -> None:
    """Sets of pairs round weights and activations to bfloat16: 2⁻⁹ of each of 576 products of about one."""
    for shape in ((50, 576), (33, 32)):
        weight, x = quantised(form, *shape, wide=wide), noise(9, shape[1], dtype=dtype)
        exact = dtype == torch.float32 and ops.name not in PAIR_SETS
        expected = REFERENCE.linear(x, REFERENCE.pack(weight), None)
        got = ops.linear(x, ops.pack(weight), None)
        torch.testing.assert_close(got, expected, atol=1e-4 if exact else 0.1, rtol=1e-2)


@pytest.mark.parametrize("form", FORMATS)
def test_a_row_has_the_same_bits_among_any_neighbours(ops: Ops, form: str) -> None:
    packed, x = ops.pack(quantised(form, 130, 576)), noise(70, 576, seed=2)
    expected = ops.linear(x, packed, None)
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for begin, count in [(0, count) for count in range(1, 71)] + [(3, 1), (5, 7), (11, 17), (30, 33), (69, 1)]:
                assert torch.equal(ops.linear(x[begin : begin + count], packed, None), expected[begin : begin + count])
    finally:
        torch.set_num_threads(1)


def test_whole_rows_need_no_multiple_of_anything(ops: Ops) -> None:
    for shape in ((5, 1), (33, 50), (40, 577)):
        weight, x = quantised("int8", *shape), noise(3, shape[1]).bfloat16()
        expected = REFERENCE.linear(x.float(), REFERENCE.pack(weight), None)
        tolerance = 0.1 if ops.name in PAIR_SETS - {TILES} else 1e-4
        torch.testing.assert_close(ops.linear(x.float(), ops.pack(weight), None), expected, atol=tolerance, rtol=1e-5)


def test_other_groups_are_refused(ops: Ops) -> None:
    weight = QuantisedWeight(torch.zeros(4, 128, dtype=torch.int8), torch.ones(4, 2), None, 8, 64)
    with pytest.raises(ValueError, match="groups of 64"):
        ops.pack(weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_torch_multiplies_with_the_numbers(form: str, dtype: torch.dtype) -> None:
    weight, x, ops = quantised(form, 33, 64), noise(5, 64, dtype=dtype), cpu_ops(dtype)
    got, numbers = ops.linear(x, ops.pack(weight), None), CPU.pack(weight.dequantise().to(dtype))
    assert torch.equal(got, CPU.linear(x, numbers, None))
    expected = REFERENCE.linear(x, REFERENCE.pack(weight), None)
    torch.testing.assert_close(got, expected, atol=tolerance(dtype), rtol=2e-2)


def test_stacked_weights_hold_every_part_exactly() -> None:
    parts = [quantised("q8_0", 3, 64), quantised("q4_1", 5, 64, seed=1), quantised("q4_0", 2, 64, seed=2)]
    stacked = stack(parts)
    assert (stacked.bits, stacked.shape) == (8, (10, 64))
    assert torch.equal(stacked.dequantise(), torch.cat([part.dequantise() for part in parts]))
    order = torch.tensor([4, 0, 9])
    assert torch.equal(stacked.rows(order).dequantise(), stacked.dequantise()[order])
