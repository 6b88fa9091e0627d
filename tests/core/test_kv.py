"""KV arithmetic against numbers worked out by hand for SmolLM2-135M."""

from __future__ import annotations

import pytest

from kvrelay.core.errors import ConfigError
from kvrelay.core.handoff import KvIdentity
from kvrelay.core.kv import KvLayout, blocks_for

SMOL = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")


def test_a_token_of_smollm2_takes_23040_bytes() -> None:
    assert SMOL.token_bytes == 23_040
    assert SMOL.block_bytes == 16 * 23_040


def test_a_gibibyte_holds_2912_blocks() -> None:
    assert SMOL.num_blocks(1 << 30) == (1 << 30) // 368_640 == 2912


def test_too_little_memory_names_what_is_needed() -> None:
    with pytest.raises(ConfigError, match="737280"):
        SMOL.num_blocks(368_640)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (256, 16)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks


def test_identities_that_differ_name_both_values() -> None:
    one = KvIdentity("m", "r", "t", 2, 2, 16, 16)
    two = KvIdentity("m", "r2", "t", 2, 2, 16, 32)
    assert one.differences(two) == ["rope: r != r2", "block_size: 16 != 32"]
    assert one.fingerprint() != two.fingerprint()
    assert one.differences(one) == []
