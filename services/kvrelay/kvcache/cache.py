"""The KV cache as the engine sees it: sequences have block tables, and this is where tables get their blocks from.

    table.blocks   [ matched prefix (shared) | own, full | own, partial ]     position i holds tokens [i·b, (i+1)·b)
    table.spare    blocks set aside at admission for growth, not yet at a position

A forked sequence shares all blocks with its parent, the partial last one too. Whoever writes into a shared block
first gets a copy of it (`prepare`), and the last of them keeps the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.core.batch import BlockCopy
from kvrelay.core.hashing import block_hash, root_hash
from kvrelay.core.ids import BlockHash, BlockId, TokenId
from kvrelay.core.kv import blocks_for
from kvrelay.kvcache.pool import BlockPool


@dataclass(slots=True, eq=False)
class BlockTable:
    """What one sequence holds. Written by `KvCache` only; `blocks` may be lent out for a step."""

    root: BlockHash
    blocks: list[BlockId] = field(default_factory=list)
    spare: list[BlockId] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    """Of the leading full blocks of the sequence's tokens, grown as the tokens do."""
    num_registered: int = 0
    """Leading blocks whose content the prefix index has been told."""


class KvCache:
    """Matches, allocates, grows, forks, registers and releases block tables. Engine thread only."""

    def __init__(self, num_blocks: int, block_size: int, identity_fingerprint: str, kv_dtype: str) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._identity = identity_fingerprint
        self._dtype = kv_dtype

    def new_table(self, tokens: Sequence[TokenId], salt: bytes) -> BlockTable:
        """A table without blocks; the prompt's full blocks are hashed once, here."""
        table = BlockTable(root_hash(salt, self._identity, self._dtype))
        self._extend_hashes(table, tokens, len(tokens) // self.block_size)
        return table

    def allocate(self, table: BlockTable, num_tokens: int, *, num_spare: int = 0, leave: int = 0) -> int | None:
        """Blocks for all `num_tokens` tokens and `num_spare` more. Returns how many leading tokens are cached already.

        None (and no change) if that would leave fewer than `leave` blocks available. At least the last token is
        never taken from the cache: somebody must compute the logits that follow it.
        """
        pool = self.pool
        matched = pool.index.match(table.hashes, (num_tokens - 1) // self.block_size)
        num_new = blocks_for(num_tokens, self.block_size) - len(matched) + num_spare
        num_available = pool.num_available - sum(1 for block in matched if pool.is_cached(block))
        if num_new + leave > num_available:
            return None
        pool.share(matched)
        fresh = pool.allocate(num_new) or []
        table.blocks = matched + fresh[: num_new - num_spare]
        table.spare = fresh[num_new - num_spare :]
        table.num_registered = len(matched)
        return len(matched) * self.block_size

    def prepare(self, table: BlockTable, begin: int, end: int) -> tuple[BlockCopy, ...] | None:
        """Make the table ready for KV of tokens [begin, end) to be written.

        Returns the copies that must be done before anything is written, or None (and no change) for lack of blocks.
        """
        missing = blocks_for(end, self.block_size) - len(table.blocks)
        first = begin // self.block_size
        is_shared = first < len(table.blocks) and self.pool.references(table.blocks[first]) > 1
        if missing <= 0 and not is_shared:
            return ()
        fresh = self._take(table, max(missing, 0) + is_shared)
        if fresh is None:
            return None
        copies: tuple[BlockCopy, ...] = ()
        if is_shared:
            source, target = table.blocks[first], fresh.pop()
            table.blocks[first] = target
            self.pool.free([source])
            copies = (BlockCopy(source, target),)
        table.blocks.extend(fresh)
        return copies

    def fork(self, table: BlockTable, num_spare: int) -> BlockTable:
        """A second table with the same content, which takes up to `num_spare` of the first one's spare blocks along."""
        self.pool.share(table.blocks)
        keep = max(len(table.spare) - num_spare, 0)
        spare = table.spare[keep:]
        del table.spare[keep:]
        return BlockTable(table.root, list(table.blocks), spare, list(table.hashes), table.num_registered)

    def register(self, table: BlockTable, tokens: Sequence[TokenId], num_computed: int) -> None:
        """KV of the first `num_computed` tokens is complete: full blocks can be matched from now on.

        Call it only after the step (or the transfer) that wrote them has completed.
        """
        num_full = num_computed // self.block_size
        if num_full <= table.num_registered:
            return
        self._extend_hashes(table, tokens, num_full)
        for i in range(table.num_registered, num_full):
            self.pool.index.register(table.hashes[i], table.blocks[i])
        table.num_registered = num_full

    def release(self, table: BlockTable) -> None:
        """Give everything back. Registered blocks stay matchable until they are evicted, the tail of a chain first."""
        index = self.pool.index
        self.pool.free(table.blocks)
        self.pool.free(table.spare)
        chain = (index.find(content) for content in reversed(table.hashes[: table.num_registered]))
        self.pool.touch(block for block in chain if block is not None)
        table.blocks, table.spare, table.num_registered = [], [], 0

    def _take(self, table: BlockTable, count: int) -> list[BlockId] | None:
        from_spare = min(count, len(table.spare))
        fresh = self.pool.allocate(count - from_spare)
        if fresh is None:
            return None
        keep = len(table.spare) - from_spare
        fresh.extend(table.spare[keep:])
        del table.spare[keep:]
        return fresh

    def _extend_hashes(self, table: BlockTable, tokens: Sequence[TokenId], num_blocks: int) -> None:
        parent = table.hashes[-1] if table.hashes else table.root
        for i in range(len(table.hashes), num_blocks):
            parent = block_hash(parent, tokens[i * self.block_size : (i + 1) * self.block_size])
            table.hashes.append(parent)
