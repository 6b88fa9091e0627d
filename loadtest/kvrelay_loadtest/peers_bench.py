"""`kvrelay bench peers`: the same work on our engine and on the engines a user would otherwise pick.

Every engine is loaded once, in a process of its own; then each row is measured in turns (A B C A B C ...), so that a
machine that slows down slows all of them. Reported are medians over the rounds of a round's median.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvrelay.core.progress import Progress
from kvrelay.model.obtain import obtain, obtain_demo_gguf
from kvrelay_loadtest.peers.catalog import PEERS, Peer, python_of, version_of, why_absent
from kvrelay_loadtest.peers.process import RunnerFailed, RunnerProcess
from kvrelay_loadtest.provenance import caption, provenance
from kvrelay_loadtest.show import note, print_table
from kvrelay_loadtest.stats import median, ratio_to_best

OURS = "kvrelay"
WEIGHTS = ("bf16", "gguf")
LOAD_S = 600.0
"""vLLM compiles at its first start."""
MEASURE_S = 180.0


@dataclass(frozen=True, slots=True)
class PeersBench:
    batches: tuple[int, ...] = (1, 8, 32)
    prompt: int = 128
    tokens: int = 128
    prefill_tokens: tuple[int, ...] = (512,)
    rounds: int = 5
    threads: int = 2
    model: str = "demo"
    gguf: str = ""
    """Default: the file the demo was made from."""
    peers: tuple[str, ...] = tuple(peer.name for peer in PEERS)


@dataclass(slots=True)
class Engine:
    """One engine on one weight format, and what was measured of it."""

    name: str
    weights: str
    command: list[str]
    model: str
    version: str = ""
    kernels: str = ""
    """What computes, where the engine tells."""
    absent: str = ""
    """Why it took no part, or no longer; empty if it did."""
    process: RunnerProcess | None = None
    decode: dict[int, list[float]] = field(default_factory=dict)
    """Tokens per second by batch, one per round."""
    prefill: dict[int, list[float]] = field(default_factory=dict)

    def call(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Empty if it failed: then it is absent from here on."""
        if self.absent or self.process is None:
            return {}
        try:
            return self.process.call(op, timeout_s, **arguments)
        except RunnerFailed as error:
            self.absent = f"{op}: {error}"
            return {}


def engines_of(bench: PeersBench, progress: Progress) -> list[Engine]:
    """Ours on both formats first, then every peer that is wanted, present or not."""
    directory = str(obtain(bench.model, progress))
    gguf = bench.gguf or str(obtain_demo_gguf(progress))
    models = {"bf16": directory, "gguf": gguf}
    runner = str(Path(__file__).parent / "peers" / "runners" / "run_kvrelay.py")
    engines = [Engine(OURS, weights, [sys.executable, runner], models[weights]) for weights in WEIGHTS]
    return engines + [_peer_engine(peer, models[peer.weights]) for peer in PEERS if peer.name in bench.peers]


def _peer_engine(peer: Peer, model: str) -> Engine:
    command = [str(python_of(peer)), str(peer.runner)]
    return Engine(peer.name, peer.weights, command, model, version_of(peer), why_absent(peer))


def run_peers_bench(bench: PeersBench, progress: Progress) -> dict[str, Any]:
    """The JSON document."""
    meta = provenance()
    engines = engines_of(bench, progress)
    with ExitStack() as stack:
        _load(bench, engines, stack, progress)
        progress.start("measure in turns", bench.rounds * (len(bench.batches) + len(bench.prefill_tokens)))
        for batch in bench.batches:
            for turn in range(bench.rounds):
                _decode_turn(bench, engines, batch, turn)
                progress.advance(1)
        for tokens in bench.prefill_tokens:
            for turn in range(bench.rounds):
                _prefill_turn(engines, tokens, turn)
                progress.advance(1)
        progress.done()
    return {"ratios": ratios(bench, engines), "engines": [_as_json(engine) for engine in engines], "meta": meta}


def _load(bench: PeersBench, engines: Sequence[Engine], stack: ExitStack, progress: Progress) -> None:
    progress.start("load the engines (a first compilation takes minutes)", len(engines))
    for engine in engines:
        if not engine.absent:
            engine.process = stack.enter_context(RunnerProcess(engine.command))
            answer = engine.call(
                "load", LOAD_S, model=engine.model, threads=bench.threads, max_batch=max(bench.batches)
            )
            engine.version = answer.get("version", engine.version)
            engine.kernels = answer.get("kernels", "")
            engine.call("decode", MEASURE_S, batch=1, prompt=bench.prompt, tokens=16, seed=1)
        progress.advance(1)
    progress.done()


def _decode_turn(bench: PeersBench, engines: Sequence[Engine], batch: int, turn: int) -> None:
    for engine in engines:
        answer = engine.call(
            "decode", MEASURE_S, batch=batch, prompt=bench.prompt, tokens=bench.tokens, seed=1000 * batch + turn
        )
        if answer:
            engine.decode.setdefault(batch, []).append(batch / median(answer["steps_s"]))


def _prefill_turn(engines: Sequence[Engine], tokens: int, turn: int) -> None:
    for engine in engines:
        answer = engine.call("prefill", MEASURE_S, tokens=tokens, seed=7000 + turn)
        if answer:
            engine.prefill.setdefault(tokens, []).append(tokens / answer["seconds"])


def ratios(bench: PeersBench, engines: Sequence[Engine]) -> dict[str, dict[str, float | None]]:
    """Ours over the best peer, per kind of work, weight format and size; None without ours or without any peer."""
    sizes = {"decode": bench.batches, "prefill": bench.prefill_tokens}
    return {
        f"{work}/{weights}": {str(size): _ratio(engines, work, weights, size) for size in sizes[work]}
        for work in ("decode", "prefill")
        for weights in WEIGHTS
    }


def _ratio(engines: Sequence[Engine], work: str, weights: str, size: int) -> float | None:
    measured = {
        engine.name: median(samples)
        for engine in engines
        if engine.weights == weights and (samples := _samples(engine, work).get(size))
    }
    ours = measured.pop(OURS, None)
    return None if ours is None else ratio_to_best(ours, measured)


def _samples(engine: Engine, work: str) -> dict[int, list[float]]:
    return engine.decode if work == "decode" else engine.prefill


def _as_json(engine: Engine) -> dict[str, Any]:
    return {
        "name": engine.name,
        "weights": engine.weights,
        "version": engine.version,
        "kernels": engine.kernels or None,
        "absent": engine.absent or None,
        **{work: {str(size): median(found) for size, found in _samples(engine, work).items()}
           for work in ("decode", "prefill")},
        "samples": {work: {str(size): found for size, found in _samples(engine, work).items()}
                    for work in ("decode", "prefill")},
    }  # fmt: skip


def print_peers_bench(document: dict[str, Any]) -> None:
    columns = [(work, size) for work in ("decode", "prefill") for size in document["ratios"][f"{work}/bf16"]]
    headings = ("engine", "weights", *(f"{work} {size}" for work, size in columns))
    rows: list[Sequence[Any]] = [
        (f"{engine['name']} {engine['version']}", engine["weights"],
         *(engine[work].get(size) for work, size in columns))
        for engine in document["engines"]
    ]  # fmt: skip
    rows += [
        ("ours ÷ best peer", weights, *(document["ratios"][f"{work}/{weights}"][size] for work, size in columns))
        for weights in WEIGHTS
    ]
    print_table("tokens/s (decode: by batch; prefill: by prompt)", headings, rows, caption(document["meta"]))
    for engine in document["engines"]:
        if engine["kernels"]:
            note(f"{engine['name']} on {engine['weights']}: {engine['kernels']}")
        if engine["absent"]:
            note(f"absent: {engine['name']} on {engine['weights']}: {engine['absent']}")
