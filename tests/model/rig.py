"""A model without an engine: one call computes tokens of some sequences, with blocks handed out in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvrelay.core.batch import Draw, Row, RowResult, StepPlan
from kvrelay.core.config import EngineSettings, ModelSettings
from kvrelay.core.ids import Attempt, BlockId, Choice, RequestId, SeqKey, TokenId
from kvrelay.core.kv import KvLayout, blocks_for
from kvrelay.core.progress import NullProgress
from kvrelay.core.request import SamplingParams
from kvrelay.model import decoder
from kvrelay.model.inputs import build_step
from kvrelay.model.load import LoadedModel, load
from kvrelay.model.rope import RopeTable
from kvrelay.model.spec import read_spec
from kvrelay.model.storage import KvStorage
from kvrelay.model.weights import load_weights
from kvrelay_kernels.dispatch import CPU, Ops

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
FLOAT32 = ModelSettings(dtype="float32")


def load_tiny(directory: Path, *, block_size: int = 16, num_blocks: int = 64) -> LoadedModel:
    return load(directory, FLOAT32, EngineSettings(block_size=block_size, num_blocks=num_blocks))


def make_row(
    token_ids: Sequence[int], computed: int, scheduled: int, blocks: Sequence[int], sampling: SamplingParams = GREEDY,
    draws: tuple[Draw, ...] = (), num_prompt: int | None = None, name: str = "r",
) -> Row:
    return Row(
        key=SeqKey(RequestId(name), Choice(0), Attempt(0)),
        token_ids=[TokenId(token) for token in token_ids],
        num_prompt=len(token_ids) if num_prompt is None else num_prompt,
        num_computed=computed,
        num_scheduled=scheduled,
        block_table=[BlockId(block) for block in blocks],
        sampling=sampling,
        draws=draws,
    )


class Sequences:
    """Runs prompts to their end on one runner, all in one batch, chunked as asked."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._next_block = 1  # block 0 stays unused: whatever reads it by mistake reads zeros

    def take_blocks(self, num_tokens: int) -> list[int]:
        count = blocks_for(num_tokens, self._model.layout.block_size)
        begin, self._next_block = self._next_block, self._next_block + count
        assert self._next_block <= self._model.num_blocks
        return list(range(begin, begin + count))

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, sampling: Sequence[SamplingParams] | None = None,
        chunk: int = 1 << 30,
    ) -> list[list[RowResult]]:
        """One RowResult per drawn token and prompt."""
        params = sampling or [GREEDY] * len(prompts)
        tokens = [list(prompt) for prompt in prompts]
        blocks = [self.take_blocks(len(prompt) + num_tokens) for prompt in prompts]
        computed = [0] * len(prompts)
        results: list[list[RowResult]] = [[] for _ in prompts]
        step = 0
        while any(len(result) < num_tokens for result in results):
            active = [i for i, result in enumerate(results) if len(result) < num_tokens]
            rows = []
            for i in active:
                scheduled = min(chunk, len(tokens[i]) - computed[i])
                last = computed[i] + scheduled == len(tokens[i])
                draws = (Draw(Choice(0), len(tokens[i]) - len(prompts[i])),) if last else ()
                rows.append(
                    make_row(tokens[i], computed[i], scheduled, blocks[i], params[i], draws, len(prompts[i]), f"r{i}")
                )
                computed[i] += scheduled
            outcome = self._model.runner.run(StepPlan(step, tuple(rows)))
            for i, row, result in zip(active, rows, outcome.rows, strict=True):
                if row.draws:
                    results[i].append(result)
                    tokens[i].append(result.tokens[0].token_id if result.tokens else 0)
            step += 1
        return results


def token_ids(results: Sequence[RowResult]) -> list[int]:
    return [result.tokens[0].token_id for result in results]


def all_logits(
    directory: Path, token_ids: Sequence[int], chunks: Sequence[int], *, ops: Ops = CPU, block_size: int = 16,
    dtype: str = "float32",
) -> Tensor:
    """Logits of every token [tokens, vocab], computed in chunks of the given sizes."""
    spec, device = read_spec(directory), torch.device("cpu")
    layout = KvLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, block_size, dtype)
    weights = load_weights(directory, spec, getattr(torch, dtype), device, ops, NullProgress())
    num_blocks = blocks_for(len(token_ids), block_size)
    storage = KvStorage(layout, num_blocks + 2, device, ops)
    rope = RopeTable(spec.rope, spec.head_dim, spec.max_context, device)
    blocks = list(range(num_blocks, 0, -1))  # backwards: a table that is read as a range shows
    outputs: list[Tensor] = []
    computed = 0
    for size in chunks:
        row = make_row(token_ids, computed, size, blocks)
        with torch.inference_mode():
            step = build_step(StepPlan(0, (row,)), spec, storage, rope, ops)
            step = dataclasses.replace(step, last_rows=torch.arange(size))
            hidden = decoder.forward(spec, weights, ops, storage.layers, step)
            outputs.append(decoder.logits(spec, weights, ops, hidden))
        computed += size
    return torch.cat(outputs)
