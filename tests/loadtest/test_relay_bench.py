"""`bench relay`: how objectives, rates and absent systems are dealt with. The systems here are made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvrelay.core.errors import ConfigError
from kvrelay.core.progress import NullProgress
from kvrelay_loadtest import relay_bench
from kvrelay_loadtest.children import ChildFailed
from kvrelay_loadtest.record import Record, as_rows
from kvrelay_loadtest.relay_bench import RelayBench, objectives_of, run_relay_bench


def test_objectives_come_from_vllm_and_from_mixed_where_it_is_absent() -> None:
    mixed = {"ttft": 100.0, "itl": 10.0}
    assert objectives_of({"mixed": mixed, "vllm_cpu": {"ttft": 200.0, "itl": 20.0}}) == {"ttft": 1000.0, "itl": 40.0}
    assert objectives_of({"mixed": mixed}) == {"ttft": 500.0, "itl": 20.0}
    assert objectives_of({"relay": mixed}) == {}


def test_the_second_pass_runs_at_a_share_of_the_best_goodput(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates: dict[str, list[float]] = {"relay": [], "mixed": []}

    @contextmanager
    def absent() -> Iterator[str]:
        raise ChildFailed("not installed")
        yield ""

    @contextmanager
    def there(name: str) -> Iterator[str]:
        yield name

    def run_at(bench: RelayBench, url: str, rate: float, name: str, progress: Any) -> dict[str, Any]:
        rates[url].append(rate)
        gap = 0.01 if url == "relay" else 1.0
        records = [Record(float(i), float(i), [i + 0.1, i + 0.1 + gap], i + 0.1 + gap, 5, 2) for i in range(4)]
        return {"records": as_rows(records), "offered_rps": rate}

    ways = {"vllm_cpu": absent, "relay": lambda: there("relay"), "mixed": lambda: there("mixed")}
    monkeypatch.setattr(relay_bench, "openers", lambda bench, directory: ways)
    monkeypatch.setattr(relay_bench, "obtain", lambda path, progress: "directory")
    monkeypatch.setattr(relay_bench, "_run_unloaded", lambda bench, url: {"ttft": 100.0, "itl": 10.0})
    monkeypatch.setattr(relay_bench, "_run_at", run_at)
    document = run_relay_bench(RelayBench(rates=(1.0, 2.0)), NullProgress())
    assert document["systems"]["vllm_cpu"] == {"absent": "not installed"}
    assert document["systems"]["mixed"]["goodput_rps"] == 0.0
    best = max(point["goodput_rps"] for point in document["sweep"]["relay"])
    assert document["rate_rps"] == pytest.approx(0.7 * best)
    assert rates["relay"] == rates["mixed"] == [1.0, 2.0, pytest.approx(0.7 * best)]
    assert "not installed" in capsys.readouterr().err


def test_a_system_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_bench, "obtain", lambda path, progress: "directory")
    with pytest.raises(ConfigError, match="no system sglang"):
        run_relay_bench(RelayBench(systems=("sglang",)), NullProgress())
