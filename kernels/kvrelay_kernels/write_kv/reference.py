"""Store the keys and values of new tokens into their slots of the paged cache."""

from __future__ import annotations

from torch import Tensor


def plan_write(slots: Tensor, cache: Tensor) -> Tensor:
    """Once per step, for any layer's `cache`. slots [tokens] int64: block · block_size + position in the block."""
    return slots


def write_kv(kv: Tensor, cache: Tensor, plan: Tensor) -> None:
    """kv [tokens, 2·kv_heads, head_dim], keys first; cache [blocks, 2, kv_heads, block_size, head_dim]."""
    _, _, kv_heads, block_size, _ = cache.shape
    for token, slot in enumerate(plan.tolist()):
        block, at = divmod(slot, block_size)
        cache[block, 0, :, at] = kv[token, :kv_heads].to(cache.dtype)
        cache[block, 1, :, at] = kv[token, kv_heads:].to(cache.dtype)
