"""The KV pool's bytes: one tensor, one contiguous span per block, typed views on it. Knows blocks, not who holds them.

    pool [num_blocks, block_bytes] uint8
         └ block: [layer][k|v][kv_head][slot][head_dim]

The pool is zeroed memory that the operating system hands out page by page, huge ones where it can: an idle worker
costs little, and decode steps over long contexts lose less time to looking up addresses. It begins on a page, so no
row of keys straddles cache lines.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvrelay.core.errors import Broken
from kvrelay.core.handoff import KvShard
from kvrelay.core.ids import BlockId
from kvrelay.core.kv import KvLayout
from kvrelay_kernels.dispatch import Ops

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KvStorage:
    """Implements `core.handoff.KvBytes`. Gather and scatter may run on other threads than the engine's: they touch
    only the blocks they are given, which their caller holds."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device, ops: Ops) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.pool = _zeroed(num_blocks, layout.block_bytes, device)
        self._ops = ops
        self._shard = KvShard(0, layout.num_layers, 0, layout.num_kv_heads, layout.dtype)
        typed = self.pool.view(DTYPES[layout.dtype])
        heads, slots, head_dim = layout.num_kv_heads, layout.block_size, layout.head_dim
        self._tiles = typed.view(num_blocks, layout.num_layers, 2, heads, slots * head_dim)
        blocks = self._tiles.view(num_blocks, layout.num_layers, 2, heads, slots, head_dim)
        self.layers: tuple[Tensor, ...] = blocks.unbind(1)
        """Per layer [num_blocks, 2, kv_heads, block_size, head_dim], sharing the pool's memory."""

    @property
    def shard(self) -> KvShard:
        return self._shard

    def copy(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        self._ops.copy_blocks(self.pool, self._index(sources), self._index(targets))

    def gather(self, blocks: Sequence[BlockId], layer_begin: int, layer_end: int) -> memoryview:
        slab = self._ops.gather_blocks(self._tiles, self._index(blocks), layer_begin, layer_end)
        array: np.ndarray[Any, Any] = slab.cpu().view(torch.uint8).numpy()
        return array.reshape(-1).data

    def scatter(
        self, blocks: Sequence[BlockId], layer_begin: int, layer_end: int, head_begin: int, head_end: int,
        payload: bytes | memoryview, dtype: str,
    ) -> None:
        """Raises Broken if the payload has not exactly the bytes that its rectangle needs."""
        if dtype not in DTYPES:
            raise Broken(f"KV of dtype {dtype!r} cannot be converted; known: {', '.join(DTYPES)}")
        tile = self.layout.block_size * self.layout.head_dim
        shape = (len(blocks), layer_end - layer_begin, 2, head_end - head_begin, tile)
        wanted = int(np.prod(shape)) * DTYPES[dtype].itemsize
        if len(payload) != wanted:
            raise Broken(f"a slab of {list(shape)} in {dtype} has {wanted} bytes, not {len(payload)}")
        raw = torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy())
        slab = raw.view(DTYPES[dtype]).view(shape).to(self.pool.device)
        self._ops.scatter_blocks(
            self._tiles, self._index(blocks), layer_begin, layer_end, head_begin, head_end, slab
        )

    def _index(self, blocks: Sequence[BlockId]) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self.pool.device)


def _zeroed(num_blocks: int, block_bytes: int, device: torch.device) -> Tensor:
    shape = (num_blocks, block_bytes)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, num_blocks * block_bytes)
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8).reshape(shape))


def capacity_line(layout: KvLayout, num_blocks: int, max_context: int) -> str:
    """For the start-up message: how much the pool holds, in words a user can compare with the load to come."""
    tokens = num_blocks * layout.block_size
    per_session = -(-max_context // layout.block_size)
    sessions = num_blocks / per_session
    shown = f"{sessions:.0f}" if sessions >= 10 else f"{sessions:.1f}"
    return f"{num_blocks:,} blocks, {tokens:,} tokens, {shown} sessions at the model's context of {max_context:,}"
