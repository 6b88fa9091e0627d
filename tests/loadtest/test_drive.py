"""The open loop on a virtual clock: when requests go out, and what their latencies are counted from."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvrelay_loadtest.drive import Driver, FakeTarget, Turn, Visit
from kvrelay_loadtest.record import Record
from kvrelay_loadtest.schedule import constant, offered_rate, poisson, replay
from kvrelay_loadtest.trace import TraceRow
from tests.support.virtual_time import run_virtual


def _visits(*times: float, max_tokens: int = 3) -> list[Visit]:
    return [Visit(at_s, (Turn(" hello", max_tokens),)) for at_s in times]


def _drive(driver: Driver, visits: list[Visit]) -> list[Record]:
    return run_virtual(driver.run(visits))


def test_a_slow_server_is_asked_no_less_often() -> None:
    target = FakeTarget(ttft_s=60.0)
    records = _drive(Driver(target), _visits(*constant(10.0, 20)))
    assert [record.sent_s for record in records] == pytest.approx([i / 10 for i in range(20)])
    assert target.most_open == 20


def test_latency_counts_from_the_scheduled_time() -> None:
    """No coordinated omission: a client that is late itself has made its user wait."""
    [record] = _drive(Driver(FakeTarget(ttft_s=0.2, itl_s=0.05)), _visits(1.0))
    assert record.ttft_ms == pytest.approx(200)
    assert record.gaps_ms == pytest.approx([50, 50])
    assert record.e2el_ms == pytest.approx(300)
    late = Record(scheduled_s=1.0, sent_s=3.0, pieces_s=[3.1], end_s=3.2)
    assert late.ttft_ms == pytest.approx(2100)


def test_turns_of_a_session_follow_each_other_with_their_history() -> None:
    target = FakeTarget(ttft_s=0.1, itl_s=0.1)
    visit = Visit(0.0, (Turn(" one", 2), Turn(" two", 1)), "s-1")
    first, second = _drive(Driver(target, think_s=2.0), [visit])
    assert [ask.prompt for ask in target.asks] == [" one", " one x x two"]
    assert {ask.session_id for ask in target.asks} == {"s-1"}
    assert second.scheduled_s == pytest.approx(first.end_s + 2.0)
    assert second.ttft_ms == pytest.approx(100)
    assert (first.turn, second.turn) == (0, 1)


def test_failures_are_counted_by_kind_and_end_their_session() -> None:
    target = FakeTarget(fail="http_503")
    [record] = _drive(Driver(target), [Visit(0.0, (Turn(" a", 2), Turn(" b", 2)))])
    assert record.error == "http_503"
    assert not record.is_good
    assert len(target.asks) == 1


def test_a_run_ends_at_its_limit() -> None:
    ended: list[int] = []
    driver = Driver(FakeTarget(ttft_s=1e6), limit_s=5.0, on_end=lambda: ended.append(1))
    records = _drive(driver, _visits(0.0, 1.0))
    assert [record.error for record in records] == ["cut_off", "cut_off"]
    assert _drive(driver, []) == []


def test_a_poisson_schedule_is_fixed_by_its_seed_and_has_its_rate() -> None:
    times = poisson(5.0, 4000, seed=3)
    assert times == poisson(5.0, 4000, seed=3) != poisson(5.0, 4000, seed=4)
    assert times[0] == 0.0
    assert all(earlier <= later for earlier, later in pairwise(times))
    assert offered_rate(times) == pytest.approx(5.0, rel=0.1)
    assert replay([TraceRow(0.5, 1, 1)]) == [0.5]
    assert offered_rate([0.0]) == 0.0
