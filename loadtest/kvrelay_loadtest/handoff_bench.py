"""`kvrelay bench handoff`: what does handing over cost, and whom?

    pipes            bandwidth and processor time of each way that KV can take (`handoff_pipes.py`)
    unhidden_share   of TTFT, by prompt length: `Committed` − `FirstToken`, the part of the transfer that a client feels
    itl_p99_ratio    streams that run on decode: ITL p99 while KV of long prompts arrives, over quiet

The last two with one prefill and one decode worker of one thread each, as plain processes over gRPC on loopback.
While long prompts arrive, prefill computes them: the ratio has the load of another busy process in it too.
"""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import httpx

from kvrelay.core.progress import NullProgress, Progress
from kvrelay.model.obtain import obtain
from kvrelay_loadtest.handoff_pipes import Bandwidth, over_grpc, over_loopback
from kvrelay_loadtest.plain_cluster import PlainCluster, WorkerWish, plain_cluster
from kvrelay_loadtest.prompts import words
from kvrelay_loadtest.provenance import caption, provenance
from kvrelay_loadtest.raw_stream import RawStream
from kvrelay_loadtest.show import note, print_table
from kvrelay_loadtest.stats import percentile

ARRIVING = 4096
"""Tokens of a prompt whose KV arrives."""
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class HandoffBench:
    sequences: int = 40
    """Through each pipe; 23.6 MB each."""
    lengths: tuple[int, ...] = (128, 1024, 4096)
    repeats: int = 3
    """Requests per length; one more before them warms up."""
    streams: int = 4
    tokens: int = 400
    """Of each running stream."""
    arrivals: int = 2
    model: str = "demo"

    def quick(self) -> HandoffBench:
        """Shows that everything works. Its numbers mean nothing."""
        return replace(self, sequences=4, lengths=(128, 1024), repeats=1, streams=2, tokens=64, arrivals=1)


def run_handoff_bench(bench: HandoffBench, progress: Progress | None = None) -> dict[str, Any]:
    """Raises ChildFailed."""
    progress = progress or NullProgress()
    document: dict[str, Any] = {"meta": provenance()}
    note("pipes ...")
    pipes: dict[str, Bandwidth] = {"grpc": over_grpc(bench.sequences), "loopback": over_loopback(bench.sequences)}
    document["pipes"] = {name: found.as_dict() for name, found in pipes.items()}
    directory = str(obtain(bench.model, progress))
    with plain_cluster(directory, [WorkerWish("prefill", 1), WorkerWish("decode", 1)], always_relay=True) as cluster:
        document |= asyncio.run(_with_cluster(bench, cluster))
    return document


async def _with_cluster(bench: HandoffBench, cluster: PlainCluster) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=TIMEOUT_S, trust_env=False) as http:
        served = (await http.get("/v1/models")).json()["data"][0]["id"]
        shares = {}
        for length in bench.lengths:
            note(f"unhidden share at {length} tokens ...")
            timings = [await _timing(http, served, length, number) for number in range(bench.repeats + 1)][1:]
            shares[str(length)] = statistics.median(each["transfer_unhidden"] / each["first_token"] for each in timings)
        note("running streams, quiet and with KV arriving ...")
        quiet = await _gaps(bench, cluster.url, served, "quiet")
        arriving = asyncio.create_task(_arrivals(bench, http, served))
        busy = await _gaps(bench, cluster.url, served, "busy")
        await arriving
    p99 = percentile(quiet, 99), percentile(busy, 99)
    return {
        "unhidden_share": shares,
        "itl_p99_ms": {"quiet": p99[0] * 1e3, "arriving": p99[1] * 1e3},
        "itl_p99_ratio": p99[1] / p99[0],
    }


async def _timing(http: httpx.AsyncClient, served: str, length: int, number: int) -> dict[str, float]:
    body = {"model": served, "prompt": _prompt(length, f"share/{number}"), "max_tokens": 4, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body)
    answer.raise_for_status()
    timing: dict[str, float] = answer.json()["usage"]["timing_ms"]
    return timing


async def _arrivals(bench: HandoffBench, http: httpx.AsyncClient, served: str) -> None:
    for number in range(bench.arrivals):
        await _timing(http, served, ARRIVING, 1000 + number)


async def _gaps(bench: HandoffBench, url: str, served: str, name: str) -> list[float]:
    """Seconds between tokens of every stream, without the first gap: it holds the handoff."""
    clocks: list[list[float]] = [[] for _ in range(bench.streams)]
    streams = []
    for number, clock in enumerate(clocks):
        body: dict[str, object] = {
            "model": served, "prompt": _prompt(64, f"{name}/{number}"), "max_tokens": bench.tokens, "stream": True,
            "ignore_eos": True,
        }  # fmt: skip
        streams.append(RawStream(url, body, partial(_note_time, clock)))
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*(stream.open() for stream in streams))
        await asyncio.gather(*(stream.run() for stream in streams))
    return [later - sooner for clock in clocks for sooner, later in pairwise(clock[1:])]


def _note_time(clock: list[float], num_chunks: int, now: float) -> None:
    clock.append(now)


def _prompt(length: int, seed: str) -> str:
    return words(f"handoff/{seed}", length - 1)


def print_handoff_bench(document: dict[str, Any]) -> None:
    pipes = [(name, found["mb_s"], found["cpu_s_per_gb"]) for name, found in document["pipes"].items()]
    print_table("Pipes", ("pipe", "MB/s", "CPU s/GB"), pipes)
    shares = [(f"{length} tokens", 100 * share) for length, share in document["unhidden_share"].items()]
    print_table("Transfer that a client feels", ("prompt", "% of TTFT"), shares)
    itl = document["itl_p99_ms"]
    print_table(
        "Running streams", ("ITL p99 quiet, ms", "while KV arrives, ms", "ratio"),
        [(itl["quiet"], itl["arriving"], document["itl_p99_ratio"])], caption(document["meta"]),
    )  # fmt: skip
