"""Who holds which block. Every block is in exactly one of four states:

            allocate                          free, content unknown to the index
    FREE ─────────────▶ HELD (references > 0) ──────────────────────────────────▶ FREE
                         │   ▲
                         │   └── share ─── CACHED (no reference, content known) ◀── free, content known
                         │                    └── evicted by allocate, least recently used first
                         └── free while pinned ──▶ DRAINING ── unpin ──▶ FREE | CACHED

    free + held + cached + draining = total, always

A pin says that somebody outside the engine (a transfer) may still touch the block's bytes: it comes back to nobody
before the last pin is gone, whatever happened to the sequences that held it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvrelay.core.errors import Broken
from kvrelay.core.ids import BlockId
from kvrelay.kvcache.prefix import PrefixIndex


class BlockPool:
    """Counts references and pins. Used by the engine thread only; callers must not keep ids they no longer hold."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.index = PrefixIndex()
        self._free = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._pins = [0] * num_blocks
        self._num_held = 0
        self._num_draining = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self._num_held

    @property
    def num_draining(self) -> int:
        return self._num_draining

    @property
    def num_available(self) -> int:
        """What `allocate` can give: free blocks, and cached ones at the price of their content."""
        return len(self._free) + len(self._cached)

    def references(self, block: BlockId) -> int:
        return self._references[block]

    def is_cached(self, block: BlockId) -> bool:
        return block in self._cached

    def allocate(self, count: int) -> list[BlockId] | None:
        """`count` blocks with one reference each, or None (and no change) if there are not that many now."""
        if count > self.num_available:
            return None
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        self._num_held += count
        return blocks

    def share(self, blocks: Iterable[BlockId]) -> None:
        """One more reference to each: blocks that somebody holds, or whose content is known."""
        for block in blocks:
            if self._references[block] == 0:
                self._revive(block)
            self._references[block] += 1

    def free(self, blocks: Sequence[BlockId]) -> None:
        """One reference less to each. `blocks` in sequence order: the tail becomes the first to be evicted."""
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise Broken(f"block {block} was freed twice")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._num_held -= 1
                if self._pins[block]:
                    self._num_draining += 1
                else:
                    self._rest(block)

    def pin(self, blocks: Iterable[BlockId]) -> None:
        """A transfer may touch these held blocks until `unpin`."""
        for block in blocks:
            if self._references[block] == 0:
                raise Broken(f"block {block} was pinned but is held by nobody")
            self._pins[block] += 1

    def unpin(self, blocks: Sequence[BlockId]) -> None:
        """The transfer is over. A block that nobody holds any more is free (or cached) from now on."""
        for block in reversed(blocks):
            if self._pins[block] <= 0:
                raise Broken(f"block {block} was unpinned twice")
            self._pins[block] -= 1
            if self._pins[block] == 0 and self._references[block] == 0:
                self._num_draining -= 1
                self._rest(block)

    def touch(self, blocks: Iterable[BlockId]) -> None:
        """Just used: the cached ones among them are evicted last, and the last of `blocks` the very last."""
        for block in blocks:
            if block in self._cached:
                self._cached.move_to_end(block)

    def check(self) -> None:
        """Count everything anew; raises Broken where the books do not agree. For tests and idle moments: O(blocks)."""
        held = sum(1 for references in self._references if references > 0)
        draining = sum(
            1 for references, pins in zip(self._references, self._pins, strict=True) if references == 0 and pins > 0
        )
        resting = [*self._free, *self._cached]
        if (held, draining) != (self._num_held, self._num_draining):
            raise Broken(f"counted {held} held and {draining} draining, booked {self._num_held}, {self._num_draining}")
        if len(set(resting)) != len(resting) or held + draining + len(resting) != self.num_blocks:
            raise Broken("a block is in two states, or in none")
        if any(self._references[block] or self._pins[block] for block in resting):
            raise Broken("a block at rest has references or pins")
        if any(block not in self.index for block in self._cached) or any(block in self.index for block in self._free):
            raise Broken("cached blocks must have known content, free blocks must not")

    def _rest(self, block: BlockId) -> None:
        if block in self.index:
            self._cached[block] = None
        else:
            self._free.append(block)

    def _revive(self, block: BlockId) -> None:
        if block in self._cached:
            del self._cached[block]
        elif self._pins[block] and block in self.index:
            self._num_draining -= 1
        else:
            raise Broken(f"block {block} was shared but is free")
        self._num_held += 1

    def _evict(self) -> BlockId:
        block, _ = self._cached.popitem(last=False)
        self.index.forget(block)
        return block
