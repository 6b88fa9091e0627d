"""Softmax attention over a paged cache, causal, in float32, one sequence after the other.

    o[t, h] = Σ_j softmax_j(scale · q[t, h] · k[j, h / group]) · v[j, h / group],   max(0, p − window + 1) ≤ j ≤ p

with p the position of query t. A row that sees no key gives 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvrelay_kernels.paged_attention.batch import AttentionBatch


def plan_attention(batch: AttentionBatch, cache: Tensor, num_heads: int) -> AttentionBatch:
    """Once per step and window, for any layer's `cache`. The reference needs no preparation."""
    return batch


def paged_attention(q: Tensor, cache: Tensor, plan: AttentionBatch) -> Tensor:
    """q [queries, heads, head_dim], cache [blocks, 2, kv_heads, block_size, head_dim] → the shape of q."""
    out = torch.zeros_like(q)
    begin = 0
    for i, (query_len, kv_len) in enumerate(zip(plan.query_lens, plan.kv_lens, strict=True)):
        end = begin + query_len
        if kv_len > 0:
            keys, values = _sequence(cache, plan.block_tables[i], kv_len)
            out[begin:end] = _attend(q[begin:end], keys, values, plan.scale, plan.window)
        begin = end
    return out


def _sequence(cache: Tensor, block_table: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
    """The keys and values of one sequence, each [kv_heads, kv_len, head_dim] float32."""
    _, _, kv_heads, block_size, head_dim = cache.shape
    num_blocks = -(-kv_len // block_size)
    tiles = cache[block_table[:num_blocks]].float()  # [blocks, 2, kv_heads, block_size, head_dim]
    tokens = tiles.permute(1, 2, 0, 3, 4).reshape(2, kv_heads, num_blocks * block_size, head_dim)
    return tokens[0, :, :kv_len], tokens[1, :, :kv_len]


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int) -> Tensor:
    query_len, heads, head_dim = q.shape
    kv_heads, kv_len, _ = keys.shape
    grouped = q.float().view(query_len, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("tkgd,kjd->kgtj", grouped, keys) * scale
    position = torch.arange(kv_len - query_len, kv_len, device=q.device)[:, None]
    key = torch.arange(kv_len, device=q.device)[None, :]
    visible = key <= position
    if window > 0:
        visible &= key > position - window
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    weights = weights.masked_fill(~visible, 0.0)  # a row of -inf alone gives NaN above
    return torch.einsum("kgtj,kjd->tkgd", weights, values).reshape(query_len, heads, head_dim).to(q.dtype)
