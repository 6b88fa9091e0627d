"""Names for KV content: a chain of blake2b over full blocks of tokens.

    h(-1) = blake2b(salt, identity fingerprint, kv dtype)
    h(i)  = blake2b(h(i-1), tokens of block i as little-endian uint32)

Equal in every process, whatever its PYTHONHASHSEED (KVC-06). The root carries the tenant's salt, so one tenant
cannot probe another's prompts, and the dtype, so that KV which passed through a lossier format has another name.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from kvrelay.core.ids import BlockHash, TokenId

HASH_BYTES = 16


def root_hash(salt: bytes, identity_fingerprint: str, kv_dtype: str) -> BlockHash:
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in (salt, identity_fingerprint.encode(), kv_dtype.encode()):
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    return BlockHash(digest.digest())


def block_hash(parent: BlockHash, tokens: Sequence[TokenId]) -> BlockHash:
    payload = struct.pack(f"<{len(tokens)}I", *tokens)
    return BlockHash(hashlib.blake2b(parent + payload, digest_size=HASH_BYTES).digest())


def chain(root: BlockHash, tokens: Sequence[TokenId], block_size: int, *, start: int = 0) -> list[BlockHash]:
    """Hashes of the full blocks of `tokens[start:]`; `root` is the hash before block `start / block_size`."""
    hashes: list[BlockHash] = []
    parent = root
    for begin in range(start, len(tokens) - block_size + 1, block_size):
        parent = block_hash(parent, tokens[begin : begin + block_size])
        hashes.append(parent)
    return hashes
