"""Did every block × layer × head arrive, and each exactly once?

One integer per block holds a bit per (layer, head); a slab is a pattern of bits in a run of blocks.
"""

from __future__ import annotations

from kvrelay.core.handoff import KvShard
from kvrelay.transfer.frames import Rectangle
from kvrelay.transfer.words import PushFailed


class Coverage:
    """What is still missing of blocks [first_block, first_block + num_blocks) of one shard."""

    def __init__(self, first_block: int, num_blocks: int, shard: KvShard) -> None:
        self._first_block = first_block
        self._shard = shard
        self._num_heads = shard.head_end - shard.head_begin
        self._full = (1 << ((shard.layer_end - shard.layer_begin) * self._num_heads)) - 1
        self._seen = [0] * num_blocks
        self._num_incomplete = num_blocks if self._full else 0

    @property
    def num_incomplete(self) -> int:
        """Blocks of which something is missing."""
        return self._num_incomplete

    def check(self, rectangle: Rectangle) -> None:
        """Raises PushFailed if it leaves the expected range or repeats something. Changes nothing."""
        self._check_range(rectangle)
        bits = self._bits(rectangle)
        for index in self._indices(rectangle):
            if self._seen[index] & bits:
                raise PushFailed(f"block {self._first_block + index} arrived twice in {rectangle}")

    def add(self, rectangle: Rectangle) -> None:
        """Note that a checked rectangle is in its blocks."""
        bits = self._bits(rectangle)
        for index in self._indices(rectangle):
            self._seen[index] |= bits
            self._num_incomplete -= self._seen[index] == self._full

    def _check_range(self, rectangle: Rectangle) -> None:
        shard = self._shard
        inside = (
            self._first_block <= rectangle.first_block
            and rectangle.num_blocks > 0
            and rectangle.first_block + rectangle.num_blocks <= self._first_block + len(self._seen)
            and shard.layer_begin <= rectangle.layer_begin < rectangle.layer_end <= shard.layer_end
            and shard.head_begin <= rectangle.head_begin < rectangle.head_end <= shard.head_end
        )
        if not inside:
            blocks = f"[{self._first_block}, {self._first_block + len(self._seen)})"
            raise PushFailed(f"{rectangle} is outside of blocks {blocks} of {shard}")

    def _indices(self, rectangle: Rectangle) -> range:
        begin = rectangle.first_block - self._first_block
        return range(begin, begin + rectangle.num_blocks)

    def _bits(self, rectangle: Rectangle) -> int:
        heads = ((1 << (rectangle.head_end - rectangle.head_begin)) - 1) << (
            rectangle.head_begin - self._shard.head_begin
        )
        bits = 0
        for layer in range(rectangle.layer_begin, rectangle.layer_end):
            bits |= heads << ((layer - self._shard.layer_begin) * self._num_heads)
        return bits
