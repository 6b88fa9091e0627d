"""`kvrelay bench handoff`: its pipes carry what they say, and its shares are shares."""

from __future__ import annotations

import pytest

from kvrelay.core.handoff import Commit
from kvrelay_loadtest import handoff_pipes
from kvrelay_loadtest.children import ChildFailed
from kvrelay_loadtest.handoff_bench import print_handoff_bench
from kvrelay_loadtest.handoff_pipes import LAYOUT, NUM_BLOCKS, over_grpc, over_loopback


@pytest.mark.parametrize("measure", [over_grpc, over_loopback])
def test_a_pipe_is_measured(measure: object) -> None:
    found = measure(1)  # type: ignore[operator]
    assert set(found.as_dict()) == {"mb_s", "cpu_s_per_gb"}
    assert min(found.as_dict().values()) > 0


def test_the_layout_is_the_demo_models() -> None:
    assert LAYOUT.token_bytes == 23_040
    assert NUM_BLOCKS * LAYOUT.block_size == 1024


def test_a_push_that_fails_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    too_many = Commit(handoff_pipes.COMMIT.num_tokens + 1, 0, handoff_pipes.COMMIT.choices)
    monkeypatch.setattr(handoff_pipes, "COMMIT", too_many)
    with pytest.raises(ChildFailed, match="commit of 1025 tokens"):
        over_loopback(1)


def test_the_table_shows_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    print_handoff_bench(
        {
            "meta": {"date": "today", "cores": 2, "cpu": "x", "load_average": [0.0]},
            "pipes": {"grpc": {"mb_s": 777.0, "cpu_s_per_gb": 1.5}},
            "unhidden_share": {"1024": 0.031},
            "itl_p99_ms": {"quiet": 20.0, "arriving": 23.0},
            "itl_p99_ratio": 1.15,
        }
    )
    shown = capsys.readouterr().out
    assert all(number in shown for number in ("777.0", "1.50", "3.10", "20.0", "23.0", "1.15"))
