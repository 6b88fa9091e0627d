"""`kvrelay bench engine`: the whole engine (schedule, model, sampling, commit) without a network.

Every decode cell (batch, context) runs `steps` steps; the medians are reported. Two columns compare with the machine:

    weight_read_fraction   weight bytes per step ÷ (step at almost no context) ÷ how fast as many bytes are read again
                           and again: weights that fit a cache partly stay in it from step to step
    kv_read_fraction       KV bytes per step ÷ (step − step at almost no context) ÷ read bandwidth

The difference of two steps is the time that attention takes for its KV. Where it is below 3 % of the step it is lost
in noise, and the fraction is None.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvrelay.core.config import EngineSettings, ModelSettings, config_from_dict
from kvrelay.core.errors import ConfigError
from kvrelay.core.kv import DTYPE_BYTES, KvLayout, blocks_for
from kvrelay.core.progress import Progress
from kvrelay.engine.spec import EngineSpec
from kvrelay.model.load import LoadedModel, load
from kvrelay.model.obtain import obtain
from kvrelay_loadtest.engine_load import StepTime, Yard
from kvrelay_loadtest.machine import Machine, best_of, measure_machine, read_gbps
from kvrelay_loadtest.provenance import caption, provenance
from kvrelay_loadtest.show import note, print_table
from kvrelay_loadtest.stats import median
from kvrelay_loadtest.timeline import WARM_STEPS as TIMELINE_WARM_STEPS
from kvrelay_loadtest.timeline import print_timeline, run_timeline
from kvrelay_loadtest.weight_bytes import weight_bytes

BASE_CONTEXT = 16
"""One block: as little attention as there can be."""
WARM_STEPS = 3
MIN_STEPS = 8
RESOLVABLE = 0.03
NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
FORMATS = ("auto", "f32", "bf16", "f16", "int8", "int4")


@dataclass(frozen=True, slots=True)
class EngineBench:
    model: str = "demo"
    weights: tuple[str, ...] = ("auto",)
    dtype: str = "auto"
    batches: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (128, 1024, 4096)
    prefill_tokens: tuple[int, ...] = (128, 512, 2048)
    steps: int = 64
    repeats: int = 5
    """Of each prefill."""
    threads: int = 0
    kv_memory: str = "6GiB"
    """Cells that need more are left out, and named."""
    cell_s: float = 20.0
    """A cell that takes longer is cut short, but never below 8 steps."""
    timeline: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    batch: int
    context: int
    step_s: float
    python_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One weight format."""

    weights: str
    kernels: str
    bytes: int
    """That a step reads, as packed."""
    read_gbps: float
    layout: KvLayout
    cells: list[Cell]


def run_engine_bench(bench: EngineBench, progress: Progress) -> dict[str, Any]:
    """The JSON document. Raises ConfigError for what cannot work."""
    check_weights(bench.weights)
    meta = provenance()
    directory = obtain(bench.model, progress)
    settings = engine_settings(bench)
    before = measure_machine(threads=bench.threads)
    measured: list[Measured] = []
    prefill: list[dict[str, Any]] = []
    skipped: list[str] = []
    timelines: dict[str, Any] = {}
    for weights in bench.weights:
        loaded = load(directory, model_settings(bench, weights), settings, threads=bench.threads, progress=progress)
        _touch(loaded)
        form = loaded.weights.form or NAMES.get(loaded.dtype, loaded.dtype)
        name = form if weights == "auto" else weights
        size = weight_bytes(loaded.weights)
        cells = _decode_cells(bench, loaded, settings, progress, skipped)
        measured.append(Measured(name, loaded.kernels, size, read_gbps(size), loaded.layout, cells))
        prefill += _prefill_rows(bench, name, loaded, settings, progress)
        if bench.timeline:
            timelines[name] = run_timeline(loaded, settings, _spec(loaded), max(bench.batches), bench.steps)
    machine = best_of(before, measure_machine(threads=bench.threads))
    rows = [
        _row(one, cell, machine) for one in measured for cell in one.cells if cell.context != BASE_CONTEXT
    ]
    formats = [
        {"weights": one.weights, "kernels": one.kernels, "bytes": one.bytes, "read_gbps": _again_gbps(one, machine)}
        for one in measured
    ]
    return {
        **asdict(machine), "rows": rows, "prefill": prefill, "formats": formats, "timelines": timelines,
        "meta": meta | {"skipped": skipped},
    }  # fmt: skip


def check_weights(names: Sequence[str]) -> None:
    """Raises ConfigError for a format nobody has heard of."""
    unknown = [name for name in names if name not in FORMATS]
    if unknown or not names:
        raise ConfigError(f"no weight format {', '.join(unknown)}; known: {', '.join(FORMATS)}")


def model_settings(bench: EngineBench, weights: str) -> ModelSettings:
    """Raises ConfigError for a format that this build does not know."""
    section: dict[str, Any] = {"path": bench.model, "dtype": bench.dtype}
    if weights != "auto":
        section["weights"] = weights
    return config_from_dict({"model": section}).model


def engine_settings(bench: EngineBench) -> EngineSettings:
    rows = max(bench.batches)
    return EngineSettings(
        kv_memory=bench.kv_memory, max_num_seqs=rows, max_waiting=rows, growth_tokens=_num_tokens(bench),
        watermark_fraction=0.0,
    )  # fmt: skip


def kv_bytes(layout: KvLayout, batch: int, context: int) -> float:
    return float(batch * context * layout.token_bytes)


def _num_tokens(bench: EngineBench) -> int:
    return bench.steps + max(WARM_STEPS, TIMELINE_WARM_STEPS) + 1


def _spec(loaded: LoadedModel) -> EngineSpec:
    return EngineSpec(
        loaded.num_blocks, loaded.layout.block_size, loaded.max_context, loaded.eos_token_ids,
        loaded.identity.fingerprint(), loaded.dtype, loaded.num_tokens,
    )  # fmt: skip


def _touch(loaded: LoadedModel) -> None:
    """Small numbers in every block: untouched pages would all be one page of zeros, and that sits in the cache."""
    import torch

    dtype = {4: torch.float32, 2: torch.bfloat16}[DTYPE_BYTES[loaded.layout.dtype]]
    pattern = (torch.arange(loaded.layout.block_bytes // dtype.itemsize) % 251 - 125).to(dtype) / 250
    loaded.storage.pool.copy_(pattern.view(torch.uint8).expand_as(loaded.storage.pool))


def _decode_cells(
    bench: EngineBench, loaded: LoadedModel, settings: EngineSettings, progress: Progress, skipped: list[str]
) -> list[Cell]:
    wanted = [(batch, context) for batch in bench.batches for context in (BASE_CONTEXT, *bench.contexts)]
    size = loaded.layout.block_size
    cells: list[Cell] = []
    progress.start("decode", len(wanted))
    for batch, context in wanted:
        num_blocks = batch * blocks_for(context + _num_tokens(bench), size)
        if num_blocks > loaded.num_blocks or context + _num_tokens(bench) > loaded.max_context:
            skipped.append(f"batch {batch}, context {context}: does not fit into {bench.kv_memory} of KV or the model")
        else:
            cells.append(_decode_cell(bench, Yard(settings, _spec(loaded), loaded.runner), batch, context))
        progress.advance(1)
    progress.done()
    return cells


def _decode_cell(bench: EngineBench, yard: Yard, batch: int, context: int) -> Cell:
    yard.decode(batch, context, bench.steps + WARM_STEPS)
    for _ in range(WARM_STEPS):
        yard.step()
    times: list[StepTime] = []
    deadline = time.perf_counter() + bench.cell_s
    while len(times) < bench.steps and (len(times) < MIN_STEPS or time.perf_counter() < deadline):
        times.append(yard.step())
        if yard.num_rows != batch:
            raise ConfigError(f"a step had {yard.num_rows} rows instead of {batch}: give more --kv-memory")
    return Cell(batch, context, median([t.total_s for t in times]), median([t.python_s for t in times]))


def _again_gbps(one: Measured, machine: Machine) -> float:
    return max(one.read_gbps, machine.read_gbps)


def _row(one: Measured, cell: Cell, machine: Machine) -> dict[str, Any]:
    base = next(other for other in one.cells if other.batch == cell.batch and other.context == BASE_CONTEXT)
    attention_s = cell.step_s - base.step_s
    read_kv = kv_bytes(one.layout, cell.batch, cell.context - BASE_CONTEXT)
    is_resolved = attention_s > RESOLVABLE * cell.step_s
    return {
        "weights": one.weights,
        "batch": cell.batch,
        "context": cell.context,
        "tokens_per_s": cell.batch / cell.step_s,
        "step_ms": cell.step_s * 1e3,
        "python_ms": cell.python_s * 1e3,
        "weight_read_fraction": one.bytes / base.step_s / 1e9 / _again_gbps(one, machine),
        "kv_read_fraction": read_kv / attention_s / 1e9 / machine.read_gbps if is_resolved else None,
    }


def _prefill_rows(
    bench: EngineBench, name: str, loaded: LoadedModel, settings: EngineSettings, progress: Progress
) -> list[dict[str, Any]]:
    fitting = [length for length in bench.prefill_tokens if length < loaded.max_context]
    progress.start(f"prefill {name}", len(fitting) * bench.repeats)
    rows = []
    for length in fitting:
        yard = Yard(settings, _spec(loaded), loaded.runner, seed=length)
        yard.prefill(min(length, 32))
        seconds = []
        for _ in range(bench.repeats):
            seconds.append(yard.prefill(length))
            progress.advance(1)
        rows.append({"weights": name, "tokens": length, "tokens_per_s": length / median(seconds)})
    progress.done()
    return rows


def print_engine_bench(document: dict[str, Any]) -> None:
    note(f"read {document['read_gbps']:.1f} GB/s, bf16 GEMM {document['gemm_gflops']:.0f} GFLOP/s")
    for one in document["formats"]:
        again = f"as many, again and again, come at {one['read_gbps']:.1f} GB/s"
        note(f"{one['weights']} by {one['kernels']}: {one['bytes'] / 1e6:.0f} MB per step; {again}")
    columns = (
        "weights", "batch", "context", "tokens_per_s", "step_ms", "python_ms", "weight_read_fraction",
        "kv_read_fraction",
    )  # fmt: skip
    rows = [[row[name] for name in columns] for row in document["rows"]]
    headings = ("weights", "batch", "context", "tokens/s", "step ms", "python ms", "weights ÷ read bw", "KV ÷ read bw")
    print_table("decode", headings, rows, caption(document["meta"]))
    names = ("weights", "tokens", "tokens_per_s")
    print_table("prefill", ("weights", "tokens", "tokens/s"), [[r[n] for n in names] for r in document["prefill"]])
    for timeline in document["timelines"].values():
        print_timeline(timeline)
    for line in document["meta"]["skipped"]:
        note(f"left out: {line}")


