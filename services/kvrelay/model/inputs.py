"""A `StepPlan` (integers) as the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvrelay.core.batch import Row, StepPlan
from kvrelay.core.kv import blocks_for
from kvrelay.model.decoder import StepTensors
from kvrelay.model.rope import RopeTable
from kvrelay.model.spec import DecoderSpec
from kvrelay.model.storage import KvStorage
from kvrelay_kernels.dispatch import Ops
from kvrelay_kernels.paged_attention.batch import AttentionBatch


def build_step(
    plan: StepPlan, spec: DecoderSpec, storage: KvStorage, rope: RopeTable, ops: Ops, *, every_token: bool = False
) -> StepTensors:
    """Rows of the plan one after the other; `last_rows`: the last token of every row that draws, or every token."""
    block_size, device = storage.layout.block_size, storage.pool.device
    token_ids: list[int] = []
    positions: list[np.ndarray[Any, Any]] = []
    slots: list[np.ndarray[Any, Any]] = []
    last_rows: list[int] = []
    for row in plan.rows:
        end = row.num_computed + row.num_scheduled
        token_ids.extend(row.token_ids[row.num_computed : end])
        position = np.arange(row.num_computed, end, dtype=np.int64)
        blocks = np.asarray(row.block_table[: blocks_for(end, block_size)], dtype=np.int64)
        positions.append(position)
        slots.append(blocks[position // block_size] * block_size + position % block_size)
        if row.draws:
            last_rows.append(len(token_ids) - 1)
    if every_token:
        last_rows = list(range(len(token_ids)))
    cos, sin = rope.at(torch.from_numpy(np.concatenate(positions)).to(device))
    cache = storage.layers[0]
    return StepTensors(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        cos=cos,
        sin=sin,
        write=ops.plan_write(torch.from_numpy(np.concatenate(slots)).to(device), cache),
        attention={
            window: ops.plan_attention(_attention_batch(plan.rows, spec, storage, window), cache, spec.num_heads)
            for window in sorted(set(spec.windows))
        },
        last_rows=torch.tensor(last_rows, dtype=torch.int64, device=device),
    )


def _attention_batch(rows: Sequence[Row], spec: DecoderSpec, storage: KvStorage, window: int) -> AttentionBatch:
    kv_lens = tuple(row.num_computed + row.num_scheduled for row in rows)
    widths = [blocks_for(kv_len, storage.layout.block_size) for kv_len in kv_lens]
    tables = np.zeros((len(rows), max(widths)), dtype=np.int64)
    for table, row, width in zip(tables, rows, widths, strict=True):
        table[:width] = row.block_table[:width]
    return AttentionBatch(
        query_lens=tuple(row.num_scheduled for row in rows),
        kv_lens=kv_lens,
        block_tables=torch.from_numpy(tables).to(storage.pool.device),
        scale=spec.scale,
        window=window,
    )
