"""Which block holds which content: the hash of a full block to the one block that is known under it, and back."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.core.ids import BlockHash, BlockId


class PrefixIndex:
    """A one-to-one map. The first block registered under a hash keeps it; a twin of the same content stays unnamed."""

    def __init__(self) -> None:
        self._block_of: dict[BlockHash, BlockId] = {}
        self._hash_of: dict[BlockId, BlockHash] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._hash_of

    def register(self, content: BlockHash, block: BlockId) -> bool:
        """False if the content has a block already, or the block a name: nothing changes then."""
        if content in self._block_of or block in self._hash_of:
            return False
        self._block_of[content] = block
        self._hash_of[block] = content
        return True

    def find(self, content: BlockHash) -> BlockId | None:
        return self._block_of.get(content)

    def match(self, contents: Sequence[BlockHash], max_blocks: int) -> list[BlockId]:
        """Blocks of the longest known beginning of the chain `contents`, at most `max_blocks` of them."""
        found: list[BlockId] = []
        for content in contents[:max_blocks]:
            block = self._block_of.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def forget(self, block: BlockId) -> None:
        """The block is about to get other content."""
        content = self._hash_of.pop(block, None)
        if content is not None:
            del self._block_of[content]
