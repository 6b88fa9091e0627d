"""What attention has to know of a step besides tensors of one layer: whose query rows, which blocks, how long."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Query rows of sequence i are [sum(query_lens[:i]), + query_lens[i]); they are its last `query_lens[i]` tokens."""

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    """Tokens whose KV is in the cache, this step's included. 0 is allowed: such rows see nothing and give 0."""
    block_tables: Tensor
    """[sequences, max_blocks] int64; entries past a sequence's own blocks may hold anything valid."""
    scale: float
    window: int = 0
    """Tokens a query sees, itself included; 0: all before it."""

    @property
    def num_queries(self) -> int:
        return sum(self.query_lens)
