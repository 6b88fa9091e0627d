"""Names of KV content must be the same in every process, for ever."""

from __future__ import annotations

import os
import subprocess
import sys

from kvrelay.core.hashing import block_hash, chain, root_hash
from kvrelay.core.ids import TokenId

ROOT = "a47b2814e14261345aeb22647ca8469c"
CHAIN = "2b2a0fc04237a65c52659d8c1f317256"
PROGRAM = """
from kvrelay.core.hashing import chain, root_hash
print(chain(root_hash(b"tenant", "model", "float32"), list(range(33)), 16)[-1].hex())
"""


def tokens(count: int) -> list[TokenId]:
    return [TokenId(i) for i in range(count)]


def test_golden_value_KVC_06() -> None:
    root = root_hash(b"tenant", "model", "float32")
    assert root.hex() == ROOT
    assert chain(root, tokens(33), 16)[-1].hex() == CHAIN


def test_equal_in_processes_of_other_hash_seeds_KVC_06() -> None:
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.strip() == CHAIN


def test_only_full_blocks_have_a_name() -> None:
    root = root_hash(b"", "model", "float32")
    assert [len(chain(root, tokens(count), 16)) for count in (0, 15, 16, 17, 32)] == [0, 0, 1, 1, 2]


def test_a_chain_can_be_continued() -> None:
    root = root_hash(b"", "model", "float32")
    whole = chain(root, tokens(64), 16)
    assert chain(whole[1], tokens(64), 16, start=32) == whole[2:]
    assert block_hash(whole[0], tokens(32)[16:]) == whole[1]


def test_salt_identity_and_dtype_separate() -> None:
    roots = {
        root_hash(salt, identity, dtype) for salt in (b"", b"a") for identity in ("m", "n") for dtype in ("f", "g")
    }
    assert len(roots) == 8
    assert root_hash(b"ab", "c", "d") != root_hash(b"a", "bc", "d")
