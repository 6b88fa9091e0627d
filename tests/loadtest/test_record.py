"""Goodput and the summary of a run."""

from __future__ import annotations

import pytest

from kvrelay.core.errors import ConfigError
from kvrelay_loadtest.record import Record, meets, parse_slo, summarise


def _record(at_s: float, *pieces_s: float, error: str = "") -> Record:
    end_s = pieces_s[-1] if pieces_s else at_s + 0.5
    return Record(at_s, at_s, list(pieces_s), end_s, num_prompt=10, num_output=len(pieces_s), error=error)


def test_objectives_are_read_in_milliseconds() -> None:
    assert parse_slo("ttft=500, itl=50ms") == {"ttft": 500.0, "itl": 50.0}
    assert parse_slo("") == {}


@pytest.mark.parametrize("text", ["ttft", "ttft=fast", "speed=3", "itl=0"])
def test_objectives_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        parse_slo(text)


def test_a_request_is_good_if_every_objective_holds() -> None:
    record = _record(0.0, 0.1, 0.15, 0.2)
    assert meets(record, {"ttft": 100.0001, "itl": 50.0001, "e2el": 200.0001, "tpot": 50.0001})
    assert not meets(record, {"ttft": 99})
    assert not meets(record, {"itl": 49})
    assert not meets(_record(0.0, 0.1, error="timeout"), {"ttft": 1e9})
    assert meets(_record(0.0, 0.1), {"itl": 1.0, "tpot": 1.0})


def test_one_stall_among_many_tokens_is_forgiven_two_in_twenty_are_not() -> None:
    even = [0.01 * i for i in range(1, 101)]
    stalled = [*even, even[-1] + 1.0]
    assert meets(_record(0.0, *stalled), {"itl": 11.0})
    twice = [0.1, 0.2, 1.2, 1.3, 2.3]
    assert not meets(_record(0.0, *twice), {"itl": 200.0})


def test_goodput_is_good_requests_over_the_whole_window() -> None:
    records = [_record(0.0, 0.1, 0.2), _record(1.0, 1.9, 2.0), _record(2.0, error="http_429"), _record(3.0, 3.1, 4.0)]
    summary = summarise(records, slo={"ttft": 200}, offered_rps=1.0)
    assert summary["window_s"] == pytest.approx(4.0)
    assert summary["goodput_rps"] == pytest.approx(2 / 4)
    assert summary["completed_rps"] == pytest.approx(3 / 4)
    assert summary["errors"] == {"http_429": 1}
    assert summary["output_tokens_per_s"] == pytest.approx(6 / 4)
    assert summary["ttft_ms"]["p50"] == pytest.approx(100)


def test_the_warm_up_is_not_counted() -> None:
    records = [_record(0.0, 30.0), _record(5.0, 5.1)]
    summary = summarise(records, slo={}, offered_rps=1.0, warmup_s=5.0)
    assert (summary["requests"], summary["ok"]) == (1, 1)
    assert summary["ttft_ms"]["max"] == pytest.approx(100)


def test_a_run_without_a_success_has_no_latencies() -> None:
    summary = summarise([_record(0.0, error="connect")], slo={}, offered_rps=1.0)
    assert summary["ttft_ms"]["p99"] is None
    assert summary["goodput_rps"] == 0.0
    assert summarise([], slo={}, offered_rps=0.0)["requests"] == 0
