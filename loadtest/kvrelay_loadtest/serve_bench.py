"""`kvrelay bench serve`: open-loop load against a URL, and what its users would have felt."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvrelay.core.errors import ConfigError
from kvrelay.core.progress import Progress
from kvrelay_loadtest import schedule
from kvrelay_loadtest.drive import Driver, Turn, Visit
from kvrelay_loadtest.gauges import GaugeWatch
from kvrelay_loadtest.prompts import prompt_of, words
from kvrelay_loadtest.provenance import caption, provenance
from kvrelay_loadtest.record import as_rows, parse_slo, summarise
from kvrelay_loadtest.show import note, print_table
from kvrelay_loadtest.targets import check_url, open_target
from kvrelay_loadtest.trace import TraceRow, choose, load_trace, scale

ARRIVALS = ("poisson", "constant", "trace")
MAX_REQUESTS = 100_000
MAX_SECONDS = 3600.0
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")


@dataclass(frozen=True, slots=True)
class ServeBench:
    url: str
    arrival: str = "poisson"
    rate: float = 1.0
    """Requests per second of poisson and constant arrivals."""
    requests: int = 64
    trace: str = ""
    """Lengths (and for `trace` the times) come from here; empty: `input_tokens` and `output_tokens`."""
    rate_scale: float = 1.0
    length_scale: float = 1.0
    min_input: int = 0
    max_input: int = 0
    max_output: int = 0
    input_tokens: int = 128
    output_tokens: int = 128
    turns: int = 1
    turn_tokens: int = 64
    think_s: float = 1.0
    slo: str = ""
    warmup_s: float = 0.0
    limit_s: float = 600.0
    timeout_s: float = 120.0
    seed: int = 0
    model: str = ""
    chat: bool = False
    ignore_eos: bool = True
    api_key: str = field(default="", repr=False)
    metrics_urls: tuple[str, ...] = ()
    label: str = ""
    allow_remote: bool = False


def check(bench: ServeBench) -> None:
    """Raises ConfigError before anything is sent."""
    check_url(bench.url, allow_remote=bench.allow_remote)
    for url in bench.metrics_urls:
        check_url(url, allow_remote=bench.allow_remote)
    if bench.arrival not in ARRIVALS:
        raise ConfigError(f"--arrival: one of {', '.join(ARRIVALS)}, found {bench.arrival!r}")
    if bench.arrival == "trace" and not bench.trace:
        raise ConfigError("--arrival trace replays a --trace: azure, mooncake, or a file")
    if min(bench.rate, bench.rate_scale, bench.length_scale) <= 0:
        raise ConfigError("--rate, --rate-scale and --length-scale are above 0")
    if not 0 < bench.requests <= MAX_REQUESTS or not 0 < bench.limit_s <= MAX_SECONDS:
        raise ConfigError(f"a run has at most {MAX_REQUESTS} requests and {MAX_SECONDS:.0f} s")
    parse_slo(bench.slo)


def visits_of(bench: ServeBench) -> list[Visit]:
    """Everything that will be sent and when: a function of the settings alone."""
    rows = _rows(bench)
    if bench.arrival == "trace":
        times = schedule.replay(rows)
    elif bench.arrival == "poisson":
        times = schedule.poisson(bench.rate, len(rows), bench.seed)
    else:
        times = schedule.constant(bench.rate, len(rows))
    return [_visit(bench, row, number, at_s) for number, (row, at_s) in enumerate(zip(rows, times, strict=True))]


def _rows(bench: ServeBench) -> list[TraceRow]:
    if not bench.trace:
        return [TraceRow(0.0, bench.input_tokens, bench.output_tokens)] * bench.requests
    rows = choose(
        load_trace(bench.trace), min_input=bench.min_input, max_input=bench.max_input, max_output=bench.max_output,
        count=bench.requests,
    )  # fmt: skip
    if not rows:
        raise ConfigError(f"no row of {bench.trace} has {bench.min_input} to {bench.max_input} input tokens")
    return scale(rows, rate=bench.rate_scale, length=bench.length_scale)


def _visit(bench: ServeBench, row: TraceRow, number: int, at_s: float) -> Visit:
    first = Turn(prompt_of(row, number, bench.length_scale, bench.seed), row.num_output)
    later = [
        Turn(words(f"{bench.seed}/turn/{number}/{turn}", bench.turn_tokens), row.num_output)
        for turn in range(1, bench.turns)
    ]
    session_id = f"bench-{random.Random(f'{bench.seed}/{number}').getrandbits(48):012x}"
    return Visit(at_s, (first, *later), session_id)


async def run_serve_bench(bench: ServeBench, progress: Progress) -> dict[str, Any]:
    """The JSON document, `records` included. Raises ConfigError."""
    check(bench)
    visits = visits_of(bench)
    target = open_target(
        bench.url, model=bench.model, chat=bench.chat, api_key=bench.api_key, timeout_s=bench.timeout_s
    )
    meta = provenance()
    progress.start(f"{bench.label or bench.url}: {len(visits)} visits", len(visits) * bench.turns)
    driver = Driver(target, bench.think_s, bench.limit_s, bench.ignore_eos, on_end=lambda: progress.advance(1))
    try:
        async with GaugeWatch(bench.metrics_urls) as watch:
            records = await driver.run(visits)
    finally:
        await target.close()
        progress.done()
    offered = schedule.offered_rate([visit.at_s for visit in visits])
    result = summarise(records, slo=parse_slo(bench.slo), offered_rps=offered, warmup_s=bench.warmup_s)
    settings = {name: value for name, value in asdict(bench).items() if name != "api_key"}
    return {
        "label": bench.label or bench.url, **result, "kv_use": watch.series, "settings": settings, "meta": meta,
        "records": as_rows(records),
    }  # fmt: skip


def serve(bench: ServeBench, progress: Progress) -> dict[str, Any]:
    return asyncio.run(run_serve_bench(bench, progress))


def without_records(document: dict[str, Any]) -> dict[str, Any]:
    """What `--json` prints; `--save` keeps the rest."""
    return {name: value for name, value in document.items() if name not in ("records", "cdf")}


def print_serve_bench(document: dict[str, Any]) -> None:
    rows: list[Sequence[Any]] = [
        (name.removesuffix("_ms").upper(), *(document[name][key] for key in ("p50", "p95", "p99", "mean", "max")))
        for name in LATENCIES
    ]
    heading = f"{document['label']}: {document['ok']} of {document['requests']} requests succeeded"
    print_table(heading, ("ms", "p50", "p95", "p99", "mean", "max"), rows, caption(document["meta"]))
    rates = ("offered_rps", "completed_rps", "goodput_rps", "input_tokens_per_s", "output_tokens_per_s")
    print_table("rates", rates, [[document[name] for name in rates]])
    if document["errors"]:
        print_table("errors", ("kind", "count"), sorted(document["errors"].items()))
    late = document["sent_late_ms"]["p99"]
    if late is not None and late > 50:
        note(f"the load generator itself was late: p99 {late:.0f} ms; latencies count it")
