"""The whole decoder as one call per step, for kernel sets that have it: what `decoder.forward` does op by op.

Made once from the loaded weights; a step then costs a few small integer arrays.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from kvrelay.core.batch import StepPlan
from kvrelay.core.kv import blocks_for
from kvrelay.model.rope import RopeTable
from kvrelay.model.spec import DecoderSpec
from kvrelay.model.storage import KvStorage
from kvrelay.model.weights import Linear, Weights
from kvrelay_kernels.decoder.native import DecoderParts, LayerParts, LinearParts, NativeDecoder, StepBatch
from kvrelay_kernels.dispatch import Ops


def one_call_decoder(
    spec: DecoderSpec, weights: Weights, storage: KvStorage, rope: RopeTable, ops: Ops
) -> NativeDecoder | None:
    """None if `ops` computes operator by operator only."""
    if ops.decoder is None:
        return None
    layers = [
        LayerParts(
            input_norm=layer.input_norm, post_norm=layer.post_norm, q_norm=layer.q_norm, k_norm=layer.k_norm,
            qkv=_parts(layer.qkv), output=_parts(layer.output), gate_up=_parts(layer.gate_up),
            down=_parts(layer.down), cache=cache, window=window,
        )
        for layer, cache, window in zip(weights.layers, storage.layers, spec.windows, strict=True)
    ]
    return ops.decoder(
        DecoderParts(
            layers=layers, embedding=weights.embedding, final_norm=weights.final_norm, head=_parts(weights.head),
            cos=rope.cos, sin=rope.sin, num_heads=spec.num_heads, eps=spec.rms_eps, scale=spec.scale,
        )
    )


def build_batch(plan: StepPlan, block_size: int, *, every_token: bool = False) -> StepBatch:
    """Rows of the plan one after the other; logits of the last token of every row that draws, or of every token."""
    rows = plan.rows
    ends = [row.num_computed + row.num_scheduled for row in rows]
    query_lens = np.array([row.num_scheduled for row in rows], dtype=np.int32)
    widths = [blocks_for(end, block_size) for end in ends]
    tables = np.zeros((len(rows), max(widths)), dtype=np.int32)
    for table, row, width in zip(tables, rows, widths, strict=True):
        table[:width] = row.block_table[:width]
    last_rows = (np.cumsum(query_lens, dtype=np.int32) - 1)[np.array([bool(row.draws) for row in rows])]
    token_ids = chain.from_iterable(row.token_ids[row.num_computed : end] for row, end in zip(rows, ends, strict=True))
    return StepBatch(
        token_ids=np.fromiter(token_ids, dtype=np.int32, count=int(query_lens.sum())),
        query_lens=query_lens,
        kv_lens=np.array(ends, dtype=np.int32),
        tables=tables,
        last_rows=np.arange(query_lens.sum(), dtype=np.int32) if every_token else last_rows,
    )


def _parts(linear: Linear) -> LinearParts:
    return LinearParts(linear.packed, linear.bias)
