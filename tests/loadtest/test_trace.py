"""Traces, and the prompts made from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.core.errors import ConfigError
from kvrelay_loadtest.prompts import prompt_of
from kvrelay_loadtest.trace import HASH_BLOCK, TraceRow, choose, load_trace, parse_azure, parse_mooncake, scale

AZURE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:50.9951690,396,109",
    "2023-11-16 18:15:51,10,1",
]
MOONCAKE = [
    '{"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}',
    '{"timestamp": 4000, "input_length": 1100, "output_length": 9, "hash_ids": [7, 8, 9]}',
    "",
]


def test_azure_times_have_seven_decimals_or_none() -> None:
    rows = parse_azure(AZURE)
    assert [row.at_s for row in rows] == pytest.approx([0.0, 4.314579, 4.31941], abs=1e-6)
    assert (rows[1].num_input, rows[1].num_output, rows[1].hash_ids) == (396, 109, ())


def test_mooncake_rows_keep_their_hash_ids() -> None:
    rows = parse_mooncake(MOONCAKE)
    assert [row.at_s for row in rows] == [0.0, 3.0]
    assert rows[1] == TraceRow(3.0, 1100, 9, (7, 8, 9))


@pytest.mark.parametrize(("name", "count"), [("azure", 600), ("mooncake", 400)])
def test_the_shipped_samples_are_in_order(name: str, count: int) -> None:
    rows = load_trace(name)
    assert len(rows) == count
    assert [row.at_s for row in rows] == sorted(row.at_s for row in rows)
    assert min(min(row.num_input, row.num_output) for row in rows) > 0


def test_what_is_no_trace_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.csv"
    broken.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match=r"broken\.csv is neither"):
        load_trace(str(broken))
    with pytest.raises(ConfigError, match="azure, mooncake"):
        load_trace(str(tmp_path / "nothing"))


def test_choosing_rows_starts_the_clock_anew() -> None:
    rows = choose(parse_azure(AZURE), min_input=380, max_input=400, max_output=50)
    assert rows == [TraceRow(0.0, 396, 50)]
    assert choose(parse_azure(AZURE), count=2)[-1].num_input == 396


def test_scaling_shortens_time_and_length() -> None:
    [_, row] = scale(parse_mooncake(MOONCAKE), rate=2.0, length=0.5)
    assert (row.at_s, row.num_input, row.num_output) == (1.5, 550, 4)


def test_equal_hash_ids_are_equal_text() -> None:
    first, second = (prompt_of(row, i) for i, row in enumerate(parse_mooncake(MOONCAKE)))
    assert len(first.split()) == 600
    assert len(second.split()) == 1100
    assert second.startswith(first)
    assert not prompt_of(TraceRow(0, 600, 5, (1, 8)), 0).startswith(first[:100])


def test_shared_prefixes_survive_scaling() -> None:
    first, second = (prompt_of(row, i, 0.25) for i, row in enumerate(scale(parse_mooncake(MOONCAKE), length=0.25)))
    shared = round(HASH_BLOCK * 0.25)
    assert first.split()[:shared] == second.split()[:shared]
    assert second.startswith(first)


def test_rows_without_ids_share_nothing_and_repeat_exactly() -> None:
    row = TraceRow(0.0, 50, 1)
    assert prompt_of(row, 0) == prompt_of(row, 0)
    assert prompt_of(row, 0).split()[:5] != prompt_of(row, 1).split()[:5]
    assert prompt_of(row, 0, seed=1) != prompt_of(row, 0)
