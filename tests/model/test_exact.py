"""DESIGN §1.13: what a sequence computes depends on its own tokens only, to the last bit.

Alone, among 6 and 31 others at any place, prefilled whole or in chunks of 16 or token by token, on one thread or two:
the same logits. On every instruction set of this machine, in both dtypes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvrelay.core.batch import Draw, Row, StepPlan
from kvrelay.core.ids import Choice
from kvrelay.core.kv import KvLayout, blocks_for
from kvrelay.core.progress import NullProgress
from kvrelay.model.one_call import build_batch, one_call_decoder
from kvrelay.model.rope import RopeTable
from kvrelay.model.spec import read_spec
from kvrelay.model.storage import KvStorage
from kvrelay.model.weights import load_weights
from kvrelay_kernels.dispatch import Ops
from tests.kernels.native_sets import SETS, native
from tests.model.rig import make_row
from tests.support.tiny import write_model_t

BLOCK_SIZE, NUM_BLOCKS, VOCAB = 16, 320, 200
PROMPT = [random.Random(7).randrange(VOCAB) for _ in range(90)]
DRAWS = (Draw(Choice(0), 0),)


class Decoding:
    """One decoder with its pool; sequences get their own blocks."""

    def __init__(self, directory: Path, ops: Ops, dtype: str) -> None:
        spec, device = read_spec(directory), torch.device("cpu")
        layout = KvLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, BLOCK_SIZE, dtype)
        weights = load_weights(directory, spec, getattr(torch, dtype), device, ops, NullProgress())
        storage = KvStorage(layout, NUM_BLOCKS, device, ops)
        decoder = one_call_decoder(spec, weights, storage, RopeTable(spec.rope, spec.head_dim, 128, device), ops)
        assert decoder is not None
        self._decoder = decoder
        self._next_block = 0

    def blocks(self, num_tokens: int) -> list[int]:
        begin, self._next_block = self._next_block, self._next_block + blocks_for(num_tokens, BLOCK_SIZE)
        return list(range(begin, self._next_block))

    def compute(self, *rows: Row) -> Tensor:
        return self._decoder.step(build_batch(StepPlan(0, rows), BLOCK_SIZE))

    def chunked(self, chunks: Sequence[int], others: Sequence[Sequence[int]] = (), place: int = 0) -> Tensor:
        """Logits after each chunk of PROMPT, computed beside one token of each of `others` at a time."""
        blocks, tables = self.blocks(len(PROMPT)), [self.blocks(len(other)) for other in others]
        logits, computed = [], 0
        for step, size in enumerate(chunks):
            rows = [make_row(other, step, 1, table, draws=DRAWS) for other, table in zip(others, tables, strict=True)]
            rows.insert(place, make_row(PROMPT, computed, size, blocks, draws=DRAWS))
            logits.append(self.compute(*rows)[place])
            computed += size
        return torch.stack(logits)


@pytest.fixture(scope="module", params=SETS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return native(request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape", [{"family": "qwen3", "num_heads": 6, "num_kv_heads": 2}, {"family": "mistral", "sliding_window": 20}],
    ids=["qwen3", "window"],
)
def test_neighbours_chunks_and_threads_change_no_bit(
    tmp_path: Path, ops: Ops, dtype: str, shape: dict[str, object]
) -> None:
    directory = write_model_t(tmp_path, **shape)
    chunks = [16, 16, 16, 16, 16, 5, 1, 1, 1, 1, 1]
    others = [[random.Random(i).randrange(VOCAB) for _ in range(len(chunks))] for i in range(31)]
    decoding = Decoding(directory, ops, dtype)
    expected = decoding.chunked(chunks)
    assert expected.isfinite().all()
    assert torch.equal(decoding.chunked([len(PROMPT)])[-1], expected[-1])
    assert torch.equal(decoding.chunked([1] * len(PROMPT))[[15, 31, 47, 63, 79, *range(84, 90)]], expected)
    for count, place in ((6, 0), (6, 6), (31, 13)):
        assert torch.equal(Decoding(directory, ops, dtype).chunked(chunks, others[:count], place), expected)
    try:
        torch.set_num_threads(2)
        assert torch.equal(Decoding(directory, ops, dtype).chunked(chunks, others[:6], 3), expected)
        assert torch.equal(Decoding(directory, ops, dtype).chunked([len(PROMPT)])[-1], expected[-1])
    finally:
        torch.set_num_threads(1)
