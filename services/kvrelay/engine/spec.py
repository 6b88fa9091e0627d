"""What the engine must know of the model and its pool: integers and names, no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineSpec:
    num_blocks: int
    block_size: int
    """Tokens per block."""
    max_context: int
    """Longest sequence of the model, prompt and output, in tokens."""
    eos_token_ids: frozenset[int]
    identity_fingerprint: str
    kv_dtype: str
    vocab_size: int = 0
    """Token ids at or above this are refused; 0: not checked."""

    @property
    def max_sequence(self) -> int:
        """Longest sequence that can finish here: the context or the whole pool, whichever is less. In tokens."""
        return min(self.max_context, self.num_blocks * self.block_size)
