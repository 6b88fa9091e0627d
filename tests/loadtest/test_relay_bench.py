"""`bench relay`: how objectives, rates and absent systems are dealt with. The systems here are made up."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvrelay.core.errors import ConfigError
from kvrelay.core.progress import NullProgress
from kvrelay_loadtest import relay_bench, relay_systems
from kvrelay_loadtest.children import Child, ChildFailed, group_cpu_s
from kvrelay_loadtest.gauges import placements
from kvrelay_loadtest.record import Record, as_rows
from kvrelay_loadtest.relay_bench import RelayBench, brief, objectives_of, run_relay_bench
from kvrelay_loadtest.relay_systems import Running, Stages, Wish, first_cores
from kvrelay_loadtest.serve_bench import ServeBench, visits_of

LIMITS = {"relay": 1.0, "mixed": 0.6}
"""Requests per second above which these systems are late."""


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, ServeBench]]:
    """Two systems that are there and vLLM that is not; what each was asked, in order."""
    asked: list[tuple[str, float, ServeBench]] = []

    @contextmanager
    def absent() -> Iterator[Running]:
        raise ChildFailed("not installed")
        yield Running("")

    @contextmanager
    def there(name: str) -> Iterator[Running]:
        yield Running(name)

    async def serve(bench: ServeBench, progress: Any) -> dict[str, Any]:
        times = [visit.at_s for visit in visits_of(bench)]
        rate = (len(times) - 1) / times[-1]
        asked.append((bench.url, rate, bench))
        gap = 0.01 if rate <= LIMITS[bench.url] * 1.001 else 1.0
        records = [Record(at_s, at_s, [at_s + 0.1, at_s + 0.1 + gap], at_s + 0.1 + gap, 5, 2) for at_s in times]
        return {"records": as_rows(records), "offered_rps": rate}

    async def unloaded(bench: RelayBench, url: str) -> dict[str, float]:
        return {"ttft": 100.0, "itl": 10.0}

    ways = {"vllm_cpu": absent, "relay": lambda: there("relay"), "mixed": lambda: there("mixed")}
    monkeypatch.setattr(relay_bench, "openers", lambda wish: ways)
    monkeypatch.setattr(relay_bench, "obtain", lambda path, progress: "directory")
    monkeypatch.setattr(relay_bench, "_unloaded", unloaded)
    monkeypatch.setattr(relay_bench, "run_serve_bench", serve)
    return asked


def test_objectives_come_from_vllm_and_from_the_first_system_where_it_is_absent() -> None:
    mixed, relay = {"ttft": 100.0, "itl": 10.0}, {"ttft": 900.0, "itl": 90.0}
    assert objectives_of({"mixed": mixed, "vllm_cpu": {"ttft": 200.0, "itl": 20.0}}) == {"ttft": 1000.0, "itl": 40.0}
    assert objectives_of({"mixed": mixed, "relay": relay}) == {"ttft": 500.0, "itl": 20.0}


def test_the_second_pass_runs_at_a_share_of_the_best_goodput_rate(
    runs: list[tuple[str, float, ServeBench]], capsys: pytest.CaptureFixture[str]
) -> None:
    document = run_relay_bench(RelayBench(start_rate=0.5, tries=3), NullProgress())
    assert document["systems"]["vllm_cpu"] == {"absent": "not installed"}
    assert "not installed" in capsys.readouterr().err
    rates: dict[str, list[float]] = {"relay": [], "mixed": []}
    for name, rate, _ in runs:
        rates[name].append(rate)
    assert rates["relay"][:3] == pytest.approx([0.5, 0.8, 1.28])
    assert rates["mixed"][:3] == pytest.approx([0.8, 0.5, 0.4**0.5])  # begins where relay ended
    assert document["goodput_rates_rps"] == pytest.approx({"relay": 0.8, "mixed": 0.5})
    assert document["rate_rps"] == pytest.approx(0.7 * 0.8)
    assert rates["relay"][3:] == rates["mixed"][3:] == pytest.approx([0.56])
    for name in ("relay", "mixed"):
        point = document["systems"][name]
        assert {"ttft_p50_ms", "itl_p99_ms", "goodput_rps", "errors"} <= set(point)
        assert (point["met_share"], point["errors"]) == (1.0, 0)


def test_no_run_on_a_system_sends_the_texts_of_another(runs: list[tuple[str, float, ServeBench]]) -> None:
    run_relay_bench(RelayBench(), NullProgress())
    texts = [bench.seed for name, _, bench in runs if name == "relay"]
    assert len(set(texts)) == len(texts) == 4
    final = {bench.seed for _, rate, bench in runs if rate == pytest.approx(0.56)}
    assert len(final) == 1  # while the second pass sends all systems the same


def test_systems_that_meet_nothing_are_compared_at_the_lowest_rate_tried(
    runs: list[tuple[str, float, ServeBench]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMITS, "relay", 0.0)
    monkeypatch.setitem(LIMITS, "mixed", 0.0)
    document = run_relay_bench(RelayBench(start_rate=0.5, tries=2), NullProgress())
    assert document["rate_rps"] == pytest.approx(0.7 * 0.5 / 1.6)
    assert document["systems"]["relay"]["goodput_rps"] == 0.0


def test_a_system_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_bench, "obtain", lambda path, progress: "directory")
    with pytest.raises(ConfigError, match="no system sglang"):
        run_relay_bench(RelayBench(systems=("sglang",)), NullProgress())


def test_a_failed_request_is_an_error_and_meets_nothing() -> None:
    good, failed = Record(0.0, 0.0, [0.1, 0.11], 0.11, 5, 2), Record(1.0, 1.0, end_s=1.5, error="http_429")
    point = brief({"records": as_rows([good, failed]), "offered_rps": 1.0}, {"ttft": 200.0, "itl": 20.0})
    assert (point["met_share"], point["errors"], point["requests"]) == (0.5, 1, 2)
    assert point["ttft_p50_ms"] == pytest.approx(100.0)


@pytest.mark.parametrize("slow_start", [True, False])
def test_what_starts_slowly_is_started_once_and_stands_still_meanwhile(slow_start: bool) -> None:
    started: list[int] = []

    @contextmanager
    def opened() -> Iterator[Running]:
        with Child("idle", [sys.executable, "-c", "import time; time.sleep(60)"]) as child:
            started.append(child.pid)
            yield Running("", {"idle": child.pid}, slow_start=slow_start)

    with Stages({"a": opened}, lambda name, why: None) as stages:
        for _ in range(2):
            stages.on("a", lambda running: None)
            if slow_start:
                os.waitpid(started[-1], os.WUNTRACED)  # a signal takes a moment
            assert _state(started[-1]) == ("T" if slow_start else "")
    assert len(started) == (1 if slow_start else 2)
    assert [_state(pid) for pid in started] == [""] * len(started)


def test_a_system_that_breaks_is_absent_from_there_on() -> None:
    said: list[str] = []
    seen: list[str] = []

    @contextmanager
    def opened() -> Iterator[Running]:
        yield Running("url")

    def work(running: Running) -> None:
        seen.append(running.url)
        raise ChildFailed("it broke")

    with Stages({"a": opened}, lambda name, why: said.append(f"{name}: {why}")) as stages:
        stages.on("a", work)
        stages.on("a", work)
    assert (said, stages.absent, seen) == (["a: it broke"], {"a": "it broke"}, ["url"])


def _state(pid: int) -> str:
    """The letter of /proc: T is stopped; empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def test_the_relay_has_half_the_threads_on_each_side_and_always_relays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[tuple[str, int]], bool]] = []

    @contextmanager
    def cluster(model: str, workers: Any, *, kv_memory: str, always_relay: bool) -> Iterator[Any]:
        asked.append(([(wish.role, wish.threads) for wish in workers], always_relay))
        raise ChildFailed("far enough")
        yield

    monkeypatch.setattr(relay_systems, "plain_cluster", cluster)
    ways = relay_systems.openers(Wish("directory", threads=2, kv_memory="1GiB"))
    for name in ("relay", "mixed"):
        with pytest.raises(ChildFailed), ways[name]():
            pass
    assert asked == [([("prefill", 1), ("decode", 1)], True), ([("mixed", 2)], True)]


def test_all_systems_and_the_client_share_the_first_cores() -> None:
    before = os.sched_getaffinity(0)
    with first_cores(1):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


def test_a_group_has_used_what_its_processes_have() -> None:
    assert group_cpu_s(os.getpgid(0)) >= sum(os.times()[:2]) - 0.02
    assert group_cpu_s(2**22 + 1) == 0.0


def test_placements_are_counted_by_mode() -> None:
    text = 'kvrelay_placements_total{mode="relay"} 12.0\nkvrelay_placements_created{mode="relay"} 1.7e9\n'
    assert placements(text + 'kvrelay_placements_total{mode="local"} 1.0\n') == {"relay": 12.0, "local": 1.0}
