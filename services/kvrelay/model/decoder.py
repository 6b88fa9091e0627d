"""The decoder of the Llama family as functions over tensors: tokens in, hidden states out, KV written on the way.

    h = embedding[token]
    per layer:  q, k, v = qkv(norm(h));  rope(q, k);  write k, v;  h += output(attention(q, cache));
                gate, up = gate_up(norm(h));  h += down(silu(gate) · up)
    logits = head(norm(h))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kvrelay.model.spec import DecoderSpec
from kvrelay.model.weights import LayerWeights, Weights
from kvrelay_kernels.dispatch import Ops, Plan
from kvrelay_kernels.linear.quantised import QuantisedWeight


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What the layers of one step share."""

    token_ids: Tensor
    """[tokens] int64."""
    cos: Tensor
    """[tokens, 1, head_dim] float32, like `sin`."""
    sin: Tensor
    write: Plan
    attention: dict[int, Plan]
    """By window."""
    last_rows: Tensor
    """[rows] int64: the tokens whose logits are wanted."""


def forward(spec: DecoderSpec, weights: Weights, ops: Ops, caches: Sequence[Tensor], step: StepTensors) -> Tensor:
    """Writes the step's KV into `caches` (one [blocks, 2, kv_heads, block_size, head_dim] view per layer).

    Returns hidden states before the final norm of the tokens in `last_rows`: [rows, hidden].
    """
    residual = _embed(weights, step.token_ids)  # [tokens, hidden]
    x = ops.rms_norm(residual, weights.layers[0].input_norm, spec.rms_eps)
    for index, layer in enumerate(weights.layers):
        if index > 0:
            x, residual = ops.add_rms_norm(x, residual, layer.input_norm, spec.rms_eps)
        x = _attention(spec, layer, ops, caches[index], step, spec.windows[index], x)
        x, residual = ops.add_rms_norm(x, residual, layer.post_norm, spec.rms_eps)
        gate_up = ops.linear(x, layer.gate_up.packed, None)  # [tokens, 2·ffn]
        x = ops.linear(ops.silu_and_mul(gate_up), layer.down.packed, None)
    return (x + residual).index_select(0, step.last_rows)


def logits(spec: DecoderSpec, weights: Weights, ops: Ops, hidden: Tensor) -> Tensor:
    """[rows, hidden] → [rows, vocab] float32."""
    x = ops.rms_norm(hidden, weights.final_norm, spec.rms_eps)
    return ops.linear(x, weights.head.packed, None).float()


def _embed(weights: Weights, token_ids: Tensor) -> Tensor:
    table = weights.embedding
    if isinstance(table, QuantisedWeight):
        return table.rows(token_ids).dequantise().to(weights.layers[0].input_norm.dtype)
    return F.embedding(token_ids, table)


def _attention(
    spec: DecoderSpec, layer: LayerWeights, ops: Ops, cache: Tensor, step: StepTensors, window: int, x: Tensor
) -> Tensor:
    q_heads, kv_heads = spec.num_heads, spec.num_kv_heads
    fused = ops.linear(x, layer.qkv.packed, layer.qkv.bias)
    heads = fused.view(x.shape[0], q_heads + 2 * kv_heads, spec.head_dim)  # query, key, value heads
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = heads[:, :q_heads], heads[:, q_heads : q_heads + kv_heads]
        q.copy_(ops.rms_norm(q, layer.q_norm, spec.rms_eps))
        k.copy_(ops.rms_norm(k, layer.k_norm, spec.rms_eps))
    ops.rotary_(heads[:, : q_heads + kv_heads], step.cos, step.sin)
    ops.write_kv(heads[:, q_heads:], cache, step.write)
    mixed = ops.paged_attention(heads[:, :q_heads], cache, step.attention[window])  # [tokens, heads, head_dim]
    return ops.linear(mixed.reshape(x.shape[0], -1), layer.output.packed, layer.output.bias)
