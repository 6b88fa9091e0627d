"""`kvrelay bench router`: what the router adds, with workers that cost nothing.

    client (this process) ── HTTP ──▶ router ── Attach ──▶ stepped worker
           └───────────── Attach, beside it ────────────────────┘

added TTFT   median over probes through the router − median over probes spoken to the worker directly, in turns, while
             the router carries `background` other streams. Connections are open before the clock starts.
CPU          processor time of the router process ÷ tokens it streamed, while all streams are running.
tokens/s     what passes while the worker steps as fast as it can: client and worker are part of that bound.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.core.progress import Progress
from kvrelay.model.obtain import obtain
from kvrelay.pb import common_pb2, worker_pb2, worker_pb2_grpc
from kvrelay.rpc.channel import open_channel
from kvrelay_loadtest.children import Child, cpu_s
from kvrelay_loadtest.plain_cluster import READY_S, router_before
from kvrelay_loadtest.prompts import words
from kvrelay_loadtest.provenance import caption, provenance
from kvrelay_loadtest.raw_stream import RawStream
from kvrelay_loadtest.show import print_table
from kvrelay_loadtest.stats import median

STEP_S = {1: 0.002, 64: 0.02, 256: 0.05}
"""Of the worker, by number of streams: some thousand tokens per second, short of what two cores can carry."""
BACKGROUND_STEP_S = 0.02
PROMPT_WORDS = 128
NEVER = 100_000
"""Tokens of a stream that is to outlive its measurement."""


@dataclass(frozen=True, slots=True)
class RouterBench:
    streams: tuple[int, ...] = (1, 64, 256)
    seconds: float = 5.0
    """Of each CPU measurement."""
    probes: int = 100
    background: int = 32
    model: str = "demo"
    """For its tokenizer."""


@dataclass(frozen=True, slots=True)
class Stage:
    url: str
    router_pid: int
    worker: str


class Meter:
    """Chunks of all streams of a run."""

    def __init__(self, num_streams: int) -> None:
        self.count = 0
        self._silent = num_streams
        self._heard: set[int] = set()
        self.all_running = asyncio.Event()

    def listener(self, number: int) -> Any:
        def on_chunks(count: int, _: float) -> None:
            self.count += count
            if number not in self._heard:
                self._heard.add(number)
                if len(self._heard) == self._silent:
                    self.all_running.set()

        return on_chunks


def run_router_bench(bench: RouterBench, progress: Progress) -> dict[str, Any]:
    """The JSON document. Raises ChildFailed."""
    meta = provenance()
    model = str(obtain(bench.model, progress))
    progress.start("router", len(bench.streams) + 2)
    cpu: dict[str, float] = {}
    for streams in bench.streams:
        with stage(model, STEP_S.get(streams, 0.05)) as at:
            used_s, tokens = asyncio.run(_load(bench, at, streams))
            cpu[str(streams)] = used_s * 1e6 / tokens
        progress.advance(1)
    with stage(model, 0.0) as at:
        _, tokens = asyncio.run(_load(bench, at, max(bench.streams)))
        progress.advance(1)
    with stage(model, BACKGROUND_STEP_S) as at:
        through, direct = asyncio.run(_probe_both(bench, at))
        progress.advance(1)
    progress.done()
    return {
        "added_ttft_ms_p50": (median(through) - median(direct)) * 1e3,
        "cpu_us_per_token": cpu,
        "tokens_per_s": tokens / bench.seconds,
        "ttft_ms_p50": {"router": median(through) * 1e3, "worker": median(direct) * 1e3},
        "meta": meta,
    }


@contextmanager
def stage(model: str, step_s: float) -> Iterator[Stage]:
    with ExitStack() as stack:
        ready = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "worker"
        command = [sys.executable, "-m", "kvrelay_loadtest.stepped_worker", str(step_s), str(ready)]
        worker = stack.enter_context(Child("stepped-worker", command))
        address = str(worker.wait_for_file(ready, READY_S)["address"])
        cluster = stack.enter_context(router_before(model, [address]))
        yield Stage(cluster.url, cluster.router_pid, address)


async def _load(bench: RouterBench, at: Stage, streams: int) -> tuple[float, int]:
    """(router's processor seconds, tokens) over `seconds` in which every stream runs."""
    async with asyncio.timeout(bench.seconds + READY_S):
        meter = Meter(streams)
        running = [asyncio.create_task(_stream(at, meter.listener(i), NEVER)) for i in range(streams)]
        try:
            await meter.all_running.wait()
            began_s, began = cpu_s(at.router_pid), meter.count
            await asyncio.sleep(bench.seconds)
            return cpu_s(at.router_pid) - began_s, max(1, meter.count - began)
        finally:
            await _cancel(running)


async def _stream(at: Stage, on_chunks: Any, max_tokens: int) -> None:
    stream = RawStream(at.url, _body(max_tokens), on_chunks)
    await stream.open()
    await stream.run()


def _body(max_tokens: int) -> dict[str, object]:
    prompt = words(uuid.uuid4().hex, PROMPT_WORDS)
    return {"model": "fake", "prompt": prompt, "max_tokens": min(max_tokens, 60_000), "stream": True, "temperature": 0}


async def _probe_both(bench: RouterBench, at: Stage) -> tuple[list[float], list[float]]:
    """Seconds to the first token through the router and directly, in turns."""
    async with asyncio.timeout(READY_S):
        meter = Meter(bench.background)
        running = [asyncio.create_task(_stream(at, meter.listener(i), NEVER)) for i in range(bench.background)]
        through, direct = [], []
        try:
            await meter.all_running.wait()
            async with DirectProbe(at.worker) as probe:
                for _ in range(bench.probes):
                    through.append(await _probe(at))
                    direct.append(await probe.first_token_s())
        finally:
            await _cancel(running)
        return through, direct


async def _probe(at: Stage) -> float:
    loop = asyncio.get_running_loop()
    times: list[float] = []
    stream = RawStream(at.url, _body(1), lambda _, now: times.append(now))
    await stream.open()
    began = loop.time()
    await stream.run()
    return times[0] - began


class DirectProbe:
    """Speaks Attach as a router does: a `Start`, then the wait for its `FirstToken`."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        stub = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]
        self._call = stub.Attach()
        self._count = 0

    async def __aenter__(self) -> DirectProbe:
        await self._call.write(worker_pb2.RouterMessage(hello=worker_pb2.Hello(router_id="bench", protocol=1)))
        await self._call.read()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()
        await self._channel.close(None)

    async def first_token_s(self) -> float:
        loop = asyncio.get_running_loop()
        self._count += 1
        start = worker_pb2.Start(
            request_id=f"direct-{self._count}", choices=[0], token_ids=[97] * PROMPT_WORDS, num_prompt=PROMPT_WORDS,
            sampling=common_pb2.Sampling(max_tokens=1), leg=worker_pb2.LEG_LOCAL, timeout_ms=60_000,
        )  # fmt: skip
        began = loop.time()
        await self._call.write(worker_pb2.RouterMessage(start=start))
        while True:
            message = await self._call.read()
            if any(e.request_id == start.request_id and e.HasField("first_token") for e in message.events.events):
                return loop.time() - began


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def print_router_bench(document: dict[str, Any]) -> None:
    rows: list[tuple[str, float]] = [("added TTFT p50, ms", document["added_ttft_ms_p50"])]
    rows += [(f"CPU per token at {n} streams, µs", us) for n, us in document["cpu_us_per_token"].items()]
    rows.append(("tokens/s at most", document["tokens_per_s"]))
    print_table("router", ("", "measured"), rows, caption(document["meta"]))
