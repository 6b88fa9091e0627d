"""One row copy per (token, k|v, head): the cache seen as rows of head_dim elements."""

from __future__ import annotations

import torch
from torch import Tensor


def plan_write(slots: Tensor, cache: Tensor) -> Tensor:
    """Row numbers [tokens · 2 · kv_heads] int64, in the order of `kv`'s rows; the same for every layer."""
    _, _, kv_heads, block_size, head_dim = cache.shape
    rows_per_block = cache.stride(0) // head_dim
    block, at = slots // block_size, slots % block_size
    heads = torch.arange(2 * kv_heads, dtype=torch.int64) * block_size
    return ((block * rows_per_block + at)[:, None] + heads).reshape(-1)


def write_kv(kv: Tensor, cache: Tensor, plan: Tensor) -> None:
    _, _, kv_heads, block_size, head_dim = cache.shape
    num_rows = (cache.shape[0] - 1) * (cache.stride(0) // head_dim) + 2 * kv_heads * block_size
    rows = cache.as_strided((num_rows, head_dim), (head_dim, 1))
    rows.index_copy_(0, plan, kv.reshape(-1, head_dim))
