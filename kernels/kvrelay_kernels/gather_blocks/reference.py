"""Blocks of the pool to and from contiguous bytes: what travels between processes.

    slab   [block, layer, k|v, head, slot · head_dim], contiguous, possibly of another dtype than the pool
    pool   [blocks, layers, 2, kv_heads, block_size · head_dim], a view of the pool's bytes
"""

from __future__ import annotations

from torch import Tensor


def gather_blocks(pool: Tensor, blocks: Tensor, layer_begin: int, layer_end: int) -> Tensor:
    """blocks [n] int64 → [n, layers, 2, kv_heads, tile], a contiguous copy."""
    return pool[:, layer_begin:layer_end].index_select(0, blocks).contiguous()


def scatter_blocks(
    pool: Tensor, blocks: Tensor, layer_begin: int, layer_end: int, head_begin: int, head_end: int, slab: Tensor
) -> None:
    """slab [n, layers, 2, heads, tile] of any float dtype, rounded to the pool's."""
    pool[blocks, layer_begin:layer_end, :, head_begin:head_end] = slab.to(pool.dtype)
