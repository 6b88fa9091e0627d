"""A step over codes: like one over the numbers they stand for, and like the reference, operator by operator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvrelay_kernels.decoder.native import DecoderParts, LayerParts, LinearParts, NativeDecoder, StepBatch
from kvrelay_kernels.dispatch import REFERENCE, Ops
from kvrelay_kernels.linear.quantised import QuantisedWeight
from kvrelay_kernels.paged_attention.batch import AttentionBatch
from tests.kernels.codes import FORMATS, quantised
from tests.kernels.native_sets import SETS, native
from tests.kernels.test_quantised_linear import PAIR_SETS, TILES

HIDDEN, FFN, HEADS, KV_HEADS, DIM, VOCAB, LAYERS, BLOCK = 96, 160, 6, 2, 16, 130, 2, 16
SHAPES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), "output": (HIDDEN, HEADS * DIM), "gate_up": (2 * FFN, HIDDEN),
    "down": (HIDDEN, FFN),
}
TOKENS = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).to(torch.int32)
POSITIONS = torch.arange(len(TOKENS))
ANGLES = POSITIONS[:, None] / 100 ** (torch.arange(DIM // 2) / (DIM // 2))
COS, SIN = torch.cat((ANGLES.cos(), ANGLES.cos()), -1), torch.cat((-ANGLES.sin(), ANGLES.sin()), -1)
TABLE = torch.tensor([[4, 0, 2]])


class Model:
    """Norms of ones, no biases; every matrix and the tied table in one format."""

    def __init__(self, form: str) -> None:
        self.table = quantised(form, VOCAB, HIDDEN, seed=1)
        self.layers = [
            {name: quantised(form, *shape, seed=10 * layer + i) for i, (name, shape) in enumerate(SHAPES.items())}
            for layer in range(LAYERS)
        ]

    def native(self, ops: Ops, form: Callable[[QuantisedWeight], Tensor | QuantisedWeight]) -> NativeDecoder:
        assert ops.decoder is not None
        pool, ones = new_pool(), torch.ones(HIDDEN)
        layers = [
            LayerParts(
                input_norm=ones, post_norm=ones, q_norm=None, k_norm=None, cache=pool[:, i], window=0,
                **{name: LinearParts(ops.pack(form(weight))) for name, weight in layer.items()},
            )
            for i, layer in enumerate(self.layers)
        ]
        head = LinearParts(ops.pack(form(self.table)))
        embedding = self.table if form is as_codes else self.table.dequantise()
        return ops.decoder(DecoderParts(layers, embedding, ones, head, COS, SIN, HEADS, 1e-5, DIM**-0.5))

    def operator_by_operator(self) -> Tensor:
        ops, pool, ones = REFERENCE, new_pool(), torch.ones(HIDDEN)
        residual = F.embedding(TOKENS, self.table.dequantise())
        slots = TABLE[0, POSITIONS // BLOCK] * BLOCK + POSITIONS % BLOCK
        batch = AttentionBatch((len(TOKENS),), (len(TOKENS),), TABLE, DIM**-0.5)
        for i, layer in enumerate(self.layers):
            weights, cache = {name: ops.pack(weight) for name, weight in layer.items()}, pool[:, i]
            qkv = ops.linear(ops.rms_norm(residual, ones, 1e-5), weights["qkv"], None)
            qkv = qkv.view(len(TOKENS), HEADS + 2 * KV_HEADS, DIM)
            ops.rotary_(qkv[:, : HEADS + KV_HEADS], COS[:, None], SIN[:, None])
            ops.write_kv(qkv[:, HEADS:], cache, ops.plan_write(slots, cache))
            mixed = ops.paged_attention(qkv[:, :HEADS], cache, ops.plan_attention(batch, cache, HEADS))
            residual = residual + ops.linear(mixed.reshape(len(TOKENS), -1), weights["output"], None)
            gate_up = ops.linear(ops.rms_norm(residual, ones, 1e-5), weights["gate_up"], None)
            residual = residual + ops.linear(ops.silu_and_mul(gate_up), weights["down"], None)
        return ops.linear(ops.rms_norm(residual, ones, 1e-5), ops.pack(self.table), None)


def new_pool() -> Tensor:
    """[blocks, layers, k|v, heads, slots, dim]."""
    return torch.zeros(6, LAYERS, 2, KV_HEADS, BLOCK, DIM)


def as_codes(weight: QuantisedWeight) -> QuantisedWeight:
    return weight


def run(decoder: NativeDecoder, chunks: list[int]) -> Tensor:
    """Logits of every token."""
    outputs, computed = [], 0
    for size in chunks:
        table, end = TABLE.to(torch.int32).numpy(), computed + size
        lens = np.array([size], dtype=np.int32), np.array([end], dtype=np.int32)
        ids = TOKENS[computed:end].numpy()
        outputs.append(decoder.step(StepBatch(ids, *lens, table, np.arange(size, dtype=np.int32))))
        computed = end
    return torch.cat(outputs)


@pytest.fixture(scope="module", params=SETS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return native(request.param)


@pytest.mark.parametrize("form", FORMATS)
def test_a_step_equals_the_operators_one_by_one(ops: Ops, form: str) -> None:
    """Sets of pairs round weights and what they meet to bfloat16, 2⁻⁹, in nine linear layers and sharp attention."""
    model = Model(form)
    expected = model.operator_by_operator()
    got = run(model.native(ops, as_codes), [40])
    tolerance = 0.15 if ops.name in PAIR_SETS else 1e-4
    torch.testing.assert_close(got, expected, atol=tolerance * float(expected.std()), rtol=0)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", [name for name in SETS if f"native/{name}" != TILES])
def test_codes_change_no_bit_of_what_their_numbers_give(name: str, form: str) -> None:
    """Tiles scale after they multiply: there the order of sums differs."""
    ops = native(name)

    def as_numbers(weight: QuantisedWeight) -> Tensor:
        return weight.dequantise().bfloat16() if ops.name in PAIR_SETS else weight.dequantise()

    model = Model(form)
    assert torch.equal(run(model.native(ops, as_codes), [40]), run(model.native(ops, as_numbers), [40]))


@pytest.mark.parametrize("form", FORMATS)
def test_chunks_and_threads_change_no_bit(ops: Ops, form: str) -> None:
    model = Model(form)
    expected = run(model.native(ops, as_codes), [40])
    for chunks in ([1] * 40, [33, 7], [16, 17, 7], [7, 32, 1]):
        assert torch.equal(run(model.native(ops, as_codes), chunks), expected)
    try:
        torch.set_num_threads(2)
        assert torch.equal(run(model.native(ops, as_codes), [3, 37]), expected)
    finally:
        torch.set_num_threads(1)
