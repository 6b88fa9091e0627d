"""KV arithmetic: how many bytes a block is, how many blocks a budget holds. Integers only.

A block is one contiguous span of bytes, outermost in the pool:

    [layer][k|v][kv_head][slot][head_dim] payload, then per-slot scales where the dtype has them
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.core.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvLayout:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens per block."""
    dtype: str

    @property
    def head_bytes(self) -> int:
        """One (layer, k|v, head) tile: `block_size × head_dim` elements."""
        return self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        return 2 * self.num_kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_size

    def num_blocks(self, memory_bytes: int) -> int:
        """Blocks that fit into `memory_bytes`. Raises ConfigError if not even two do."""
        count = memory_bytes // self.block_bytes
        if count < 2:
            raise ConfigError(
                f"kv_memory of {memory_bytes} bytes holds {count} blocks of {self.block_bytes} bytes; "
                f"give at least {2 * self.block_bytes}"
            )
        return count


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)
