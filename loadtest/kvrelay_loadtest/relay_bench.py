"""`kvrelay bench relay`: is decode undisturbed by prefill? Three systems (`relay_systems.py`), one after the other.

    first pass    each system: a few requests, each alone ─▶ unloaded latencies
                  of vLLM's: objectives = 5 × TTFT, 2 × ITL
                  each system: short runs at rates of its own choice ─▶ its goodput rate (`relay_search.py`)
    second pass   each system at one rate, 70 % of the best goodput rate: the numbers of the document

Every run replays the same rows of the trace, only faster or slower: its bursts stay. The texts differ from run to run,
so that no run finds its prompts in a prefix cache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx

from kvrelay.core.errors import ConfigError
from kvrelay.core.progress import NullProgress, Progress
from kvrelay.model.obtain import obtain
from kvrelay_loadtest.children import ChildFailed
from kvrelay_loadtest.drive import Driver, Visit
from kvrelay_loadtest.gauges import placements
from kvrelay_loadtest.provenance import caption, provenance
from kvrelay_loadtest.record import Record, meets, summarise
from kvrelay_loadtest.relay_search import SHARE, goodput_rate, next_rate
from kvrelay_loadtest.relay_systems import Running, Stages, Wish, first_cores, openers
from kvrelay_loadtest.schedule import offered_rate
from kvrelay_loadtest.serve_bench import ServeBench, run_serve_bench, visits_of
from kvrelay_loadtest.show import note, print_table
from kvrelay_loadtest.stats import median
from kvrelay_loadtest.targets import open_target

TTFT_FACTOR, ITL_FACTOR, SHARE_OF_BEST = 5.0, 2.0, 0.7
TIMEOUT_S = 120.0
UNLOADED_SEED, FINAL_SEED = 1_000_000, 2_000_000
COLUMNS = {
    "offered_rps": "asked/s", "goodput_rps": "good/s", "met_share": "met", "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "p99", "itl_p50_ms": "ITL p50", "itl_p99_ms": "p99", "errors": "errors",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RelayBench:
    start_rate: float = 0.5
    """Requests per second of the first run of the first system; the next begins where the last one ended."""
    tries: int = 3
    """Runs per system in the first pass."""
    seconds: float = 25.0
    """Of arrivals in each of them."""
    final_seconds: float = 60.0
    probes: int = 5
    """Unloaded requests; one more before them warms up."""
    min_requests: int = 8
    """Of any run, however low its rate."""
    trace: str = "azure"
    min_input: int = 1000
    max_input: int = 2000
    max_output: int = 128
    threads: int = 2
    model: str = "demo"
    kv_memory: str = "1GiB"
    systems: tuple[str, ...] = ("vllm_cpu", "relay", "mixed")
    hurried: bool = False
    """vLLM starts without compiling."""

    def quick(self) -> RelayBench:
        """Shows that everything works, within three minutes. Its numbers mean nothing."""
        return replace(
            self, tries=1, seconds=8.0, final_seconds=12.0, probes=1, min_requests=4, max_output=32, hurried=True
        )


@dataclass(slots=True)
class Found:
    """What the first pass has learnt."""

    unloaded: dict[str, dict[str, float]] = field(default_factory=dict)
    objectives: dict[str, float] = field(default_factory=dict)
    sweep: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    goodput_rates: dict[str, float] = field(default_factory=dict)

    @property
    def last_rate(self) -> float:
        """Where the last system's search ended; 0 before any."""
        return next((rate for rate in reversed(self.goodput_rates.values()) if rate > 0), 0.0)

    @property
    def best_rate(self) -> float:
        """The lowest rate tried if no system met any."""
        tried = [point["offered_rps"] for points in self.sweep.values() for point in points]
        return max(self.goodput_rates.values(), default=0.0) or min(tried, default=0.0)


def run_relay_bench(bench: RelayBench, progress: Progress) -> dict[str, Any]:
    """The JSON document. Raises ConfigError for a system that does not exist."""
    meta = provenance()
    ways = openers(Wish(str(obtain(bench.model, progress)), bench.threads, bench.kv_memory, not bench.hurried))
    unknown = [name for name in bench.systems if name not in ways]
    if unknown:
        raise ConfigError(f"no system {', '.join(unknown)}; known: {', '.join(ways)}")
    found = Found()
    with first_cores(bench.threads), Stages(ways, _say_absent) as stages:
        progress.start("first pass: unloaded latencies, then the goodput rate of each system", len(bench.systems))
        for name in bench.systems:
            note(f"  {name}: starting")
            stages.on(name, partial(_first, bench, name, found))
            progress.advance(1)
        progress.done()
        rate = SHARE_OF_BEST * found.best_rate
        systems = _second_pass(bench, stages, found, rate, progress) if rate > 0 else {}
    return {
        "systems": {**systems, **{name: {"absent": why} for name, why in stages.absent.items()}},
        "rate_rps": rate, "slo_ms": found.objectives, "goodput_rates_rps": found.goodput_rates,
        "unloaded_ms": found.unloaded, "sweep": found.sweep, "meta": meta,
    }  # fmt: skip


def _first(bench: RelayBench, name: str, found: Found, running: Running) -> None:
    found.unloaded[name] = asyncio.run(_unloaded(bench, running.url))
    note(f"  {name} unloaded: " + ", ".join(f"{key} {ms:.0f} ms" for key, ms in found.unloaded[name].items()))
    if not found.objectives:
        found.objectives = objectives_of(found.unloaded)
    tried: dict[float, bool] = {}
    points = found.sweep[name] = []
    start = found.last_rate or bench.start_rate
    while (rate := next_rate(tried, start, bench.tries)) is not None:
        point = _run_at(bench, running, rate, name, found.objectives, seed=round(rate * 1000))
        points.append(point)
        tried[rate] = point["met_share"] >= SHARE
    found.goodput_rates[name] = goodput_rate(tried)


def _second_pass(
    bench: RelayBench, stages: Stages, found: Found, rate: float, progress: Progress
) -> dict[str, Any]:
    systems: dict[str, Any] = {}
    final = replace(bench, seconds=bench.final_seconds)

    def second(name: str, running: Running) -> None:
        asyncio.run(_unloaded(replace(bench, probes=1), running.url))
        before = _placements(running)
        systems[name] = _run_at(final, running, rate, name, found.objectives, seed=FINAL_SEED)
        after = _placements(running)
        systems[name]["placements"] = {mode: count - before.get(mode, 0.0) for mode, count in after.items()}

    progress.start(f"second pass: {rate:.2f} requests/s", len(bench.systems))
    for name in bench.systems:
        stages.on(name, partial(second, name))
        progress.advance(1)
    progress.done()
    return systems


def _placements(running: Running) -> dict[str, float]:
    """By mode, so far; none for systems that are not ours."""
    if not running.metrics_url:
        return {}
    return placements(httpx.get(running.metrics_url, trust_env=False, timeout=TIMEOUT_S).text)


def objectives_of(unloaded: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """From vLLM's unloaded latencies; from those of the first system there is where vLLM is absent."""
    known = unloaded.get("vllm_cpu") or next(iter(unloaded.values()))
    return {"ttft": TTFT_FACTOR * known["ttft"], "itl": ITL_FACTOR * known["itl"]}


def _serve_bench(bench: RelayBench, url: str, requests: int, seed: int) -> ServeBench:
    return ServeBench(
        url, "trace", requests=requests, trace=bench.trace, min_input=bench.min_input, max_input=bench.max_input,
        max_output=bench.max_output, seed=seed, timeout_s=TIMEOUT_S, limit_s=2 * bench.seconds + TIMEOUT_S / 2,
    )  # fmt: skip


async def _unloaded(bench: RelayBench, url: str) -> dict[str, float]:
    """A few requests, each when the one before has ended: medians of TTFT and ITL in milliseconds."""
    visits = visits_of(_serve_bench(bench, url, bench.probes + 1, UNLOADED_SEED))
    target = open_target(url, model="", chat=False, api_key="", timeout_s=TIMEOUT_S)
    driver = Driver(target, limit_s=TIMEOUT_S)
    try:
        alone = [await driver.run([Visit(0.0, visit.turns, visit.session_id)]) for visit in visits]
    finally:
        await target.close()
    records = [record for run in alone for record in run]
    failed = [record.error for record in records if not record.is_good]
    if failed:
        raise ChildFailed(f"unloaded requests failed: {', '.join(failed)}")
    gaps = [gap for record in records[1:] for gap in record.gaps_ms]
    return {"ttft": median([record.ttft_ms for record in records[1:]]), "itl": median(gaps)}


def _run_at(
    bench: RelayBench, running: Running, rate: float, name: str, objectives: Mapping[str, float], seed: int
) -> dict[str, Any]:
    """The trace's rows at `rate` requests per second, in brief."""
    plain = _serve_bench(bench, running.url, max(bench.min_requests, round(rate * bench.seconds)), seed)
    native = offered_rate([visit.at_s for visit in visits_of(plain)])
    began_s, before, client = time.monotonic(), running.cpu_s(), time.process_time()
    document = asyncio.run(run_serve_bench(replace(plain, rate_scale=rate / native), NullProgress()))
    wall_s = time.monotonic() - began_s
    cores = {role: (used - before[role]) / wall_s for role, used in running.cpu_s().items()}
    point = brief(document, objectives) | {"cores": {"client": (time.process_time() - client) / wall_s, **cores}}
    note(f"  {name} at {rate:.2f}/s: {point['met_share']:.0%} met, " + ", ".join(
        f"{key.removesuffix('_ms').replace('_', ' ')} {_ms(point[key])}" for key in ("ttft_p50_ms", "itl_p99_ms")
    ))  # fmt: skip
    return point


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} ms"


def brief(document: Mapping[str, Any], objectives: Mapping[str, float]) -> dict[str, Any]:
    """Judged by the objectives, which were not known when the first of these runs began."""
    records = [Record(**row) for row in document["records"]]
    summary = summarise(records, slo=objectives, offered_rps=document["offered_rps"])
    return {
        "ttft_p50_ms": summary["ttft_ms"]["p50"],
        "itl_p99_ms": summary["itl_ms"]["p99"],
        "goodput_rps": summary["goodput_rps"],
        "errors": sum(summary["errors"].values()),
        "met_share": sum(meets(record, objectives) for record in records) / max(1, len(records)),
        "requests": len(records),
        "offered_rps": summary["offered_rps"],
        "itl_p50_ms": summary["itl_ms"]["p50"],
        "ttft_p99_ms": summary["ttft_ms"]["p99"],
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "sent_late_p99_ms": summary["sent_late_ms"]["p99"],
    }


def _say_absent(name: str, why: str) -> None:
    note(f"absent: {name}: {why}")


def print_relay_bench(document: dict[str, Any]) -> None:
    slo = ", ".join(f"{name} {limit:.0f} ms" for name, limit in document["slo_ms"].items())
    rates = ", ".join(f"{name} {rate:.2f}" for name, rate in document["goodput_rates_rps"].items())
    note(f"objectives: {slo}; goodput rates, requests/s: {rates}; second pass at {document['rate_rps']:.2f}")
    there = {name: point for name, point in document["systems"].items() if "absent" not in point}
    for title, points in (
        ("first pass", [(name, point) for name, runs in document["sweep"].items() for point in runs]),
        ("second pass: 70 % of the best goodput rate", list(there.items())),
    ):
        rows = [(name, *(point[column] for column in COLUMNS)) for name, point in points]
        print_table(title, ("system", *COLUMNS.values()), rows, caption(document["meta"]))
    busy = [(name, role, share) for name, point in there.items() for role, share in point["cores"].items()]
    print_table("cores in use during the second pass", ("system", "process", "cores"), busy)
    for name, point in document["systems"].items():
        if "absent" in point:
            note(f"absent: {name}: {point['absent']}")
        elif point.get("placements"):
            note(f"{name} placed: " + ", ".join(f"{count:.0f} {mode}" for mode, count in point["placements"].items()))
