"""Copy whole KV blocks inside the pool (copy-on-write forks)."""

from __future__ import annotations

from torch import Tensor


def copy_blocks(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """pool [blocks, block_bytes] uint8; sources, targets [n] int64. A target is never also a source."""
    pool.index_copy_(0, targets, pool.index_select(0, sources))
