"""`kvrelay bench quality`: what a weight format or a KV format does to the distribution of the next token.

    text sample ─▶ windows ─▶ logits at every token ─▶ against those of the same numbers in float32

    KL      Σ p · (log p − log q) per token, in nats (p float32, q the format): mean and 99th percentile
    top-1   share of tokens whose likeliest successor is the same

Two baselines, both float32 weights, arithmetic and KV. `safetensors`: the checkpoint's own numbers; int8 and int4 are
made from them, so their rows are what these formats cost. `gguf`: the file's own codes, written out as float32; its row
is what computing with the codes costs, not what was lost when somebody made the file.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.core.config import config_from_dict
from kvrelay.core.errors import ConfigError
from kvrelay.core.kv import blocks_for
from kvrelay.core.progress import NullProgress, Progress
from kvrelay.model.load import LoadedModel, load
from kvrelay.model.obtain import obtain, obtain_demo_gguf
from kvrelay.text.tokenizer import Tokenizer
from kvrelay_loadtest.drift import Drift, NotFinite, compare, every_logits, log_probabilities, windows_of
from kvrelay_loadtest.provenance import caption, provenance
from kvrelay_loadtest.show import note, print_table

if TYPE_CHECKING:
    from torch import Tensor

Windows = Sequence[Sequence[int]]
"""Token ids of each."""

TEXTS = Path(__file__).parent / "texts"
BLOCK = 16
SPARE_BLOCKS = 2
"""The first block stays unused, and a pool holds at least two."""
WEIGHTS = ("bf16", "int8", "int4")
"""Made from safetensors. `gguf` is a format too: whatever the file holds."""
KV = ("bf16", "int8")
CHECKPOINT = "the checkpoint's own numbers, computed in float32"
WRITTEN_OUT = "the file's own codes written out as float32, computed in float32: what computing with the codes costs"
COLUMNS = ("weights", "held as", "KV", "kernels", "KL mean", "KL p99", "top-1")


@dataclass(frozen=True, slots=True)
class QualityBench:
    model: str = "demo"
    gguf: str = ""
    """Default: the demo's, for the demo."""
    weights: tuple[str, ...] = (*WEIGHTS, "gguf")
    kv: tuple[str, ...] = KV
    text: str = ""
    """A file, or a directory of *.txt; default: the sample that ships with this package."""
    window: int = 512
    chunk: int = 256
    """Tokens per step: later chunks read the KV of earlier ones back from the pool."""
    max_tokens: int = 4096
    threads: int = 0
    limit_s: float = 600.0
    """Formats that are not reached by then are reported as absent."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where weights come from, and the same numbers for the baseline."""

    name: str
    path: Path
    exact: Path
    """A directory that float32 can be loaded from."""
    meaning: str


def run_quality_bench(bench: QualityBench, progress: Progress) -> dict[str, Any]:
    """The JSON document. Raises ConfigError for names that are no formats, or a text that cannot be read."""
    check(bench)
    meta = provenance()
    deadline = time.monotonic() + bench.limit_s
    directory = obtain(bench.model, progress)
    texts = read_texts(bench.text)
    tokenizer = Tokenizer.from_directory(directory)
    windows = windows_of([tokenizer.encode(text) for text in texts.values()], bench.window, bench.max_tokens)
    plain = [name for name in bench.weights if name != "gguf"]
    rows: list[dict[str, Any]] = []
    if plain:
        source = Source("safetensors", directory, directory, CHECKPOINT)
        rows += _rows(bench, source, plain, windows, deadline, progress)
    if "gguf" in bench.weights:
        rows += _gguf_rows(bench, windows, deadline, progress)
    sample = {"files": list(texts), "tokens": sum(map(len, windows)), "windows": len(windows)}
    return {"rows": rows, "sample": sample, "meta": meta}


def check(bench: QualityBench) -> None:
    for flag, given, known in (("--weights", bench.weights, (*WEIGHTS, "gguf")), ("--kv", bench.kv, KV)):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ConfigError(f"{flag}: no format {', '.join(unknown)}; known: {', '.join(known)}")


def read_texts(path: str) -> dict[str, str]:
    """By file name."""
    place = Path(path) if path else TEXTS
    files = sorted(place.glob("*.txt")) if place.is_dir() else [place]
    try:
        texts = {file.name: file.read_text() for file in files}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text: cannot read {place}: {error}") from error
    if not any(texts.values()):
        raise ConfigError(f"--text: there is no text in {place}")
    return texts


def _gguf_rows(bench: QualityBench, windows: Windows, deadline: float, progress: Progress) -> list[dict[str, Any]]:
    if not bench.gguf and bench.model != "demo":
        why = "which file? Give it with --gguf"
        return [_absent("gguf", kv, why) | {"baseline": None} for kv in bench.kv]
    file = Path(bench.gguf) if bench.gguf else obtain_demo_gguf(progress)
    with _written_out(file, progress) as exact:
        return _rows(bench, Source("gguf", file, exact, WRITTEN_OUT), ["gguf"], windows, deadline, progress)


@contextmanager
def _written_out(file: Path, progress: Progress) -> Iterator[Path]:
    """The numbers of a GGUF as a float32 checkpoint, for as long as they are needed."""
    import torch

    from kvrelay.model.gguf_import import import_gguf

    with tempfile.TemporaryDirectory(prefix="kvrelay-quality-") as scratch:
        import_gguf(file, Path(scratch), progress, dtype=torch.float32)
        yield Path(scratch)


def _rows(
    bench: QualityBench, source: Source, weights: Sequence[str], windows: Windows, deadline: float, progress: Progress
) -> list[dict[str, Any]]:
    cases = [(name, kv) for name in weights for kv in bench.kv]
    progress.start(f"{source.name}: float32, then {len(cases)} formats", len(cases) + 1)
    baseline = _load(bench, source.exact, {"dtype": "float32"}, {})
    wanted = [log_probabilities(every_logits(baseline, window, bench.chunk)) for window in windows]
    del baseline
    rows = []
    for name, kv in cases:
        progress.advance(1)
        row = _row(bench, source, name, kv, windows, wanted, deadline)
        rows.append(row | {"baseline": f"{source.name}: {source.meaning}"})
    progress.done()
    return rows


def _row(
    bench: QualityBench, source: Source, weights: str, kv: str, windows: Windows, wanted: Sequence[Tensor],
    deadline: float,
) -> dict[str, Any]:
    if time.monotonic() > deadline:
        return _absent(weights, kv, f"not reached within {bench.limit_s:.0f} s")
    try:
        model = _load(bench, source.path, _model_section(weights), _engine_section(kv))
    except ConfigError as error:
        return _absent(weights, kv, str(error))
    began = time.perf_counter()
    try:
        drift = Drift.total(
            compare(log_p, every_logits(model, window, bench.chunk))
            for window, log_p in zip(windows, wanted, strict=True)
        )
    except NotFinite as error:
        return _absent(weights, kv, str(error))
    return {
        "weights": weights, "kv": kv, "form": model.weights.form or model.dtype, "kernels": model.kernels,
        "kv_dtype": model.layout.dtype,
        "kl_mean": drift.mean, "kl_p99": drift.p99, "top1": drift.top1, "tokens": drift.count,
        "seconds": time.perf_counter() - began, "absent": None,
    }  # fmt: skip


def _absent(weights: str, kv: str, why: str) -> dict[str, Any]:
    return {"weights": weights, "kv": kv, **dict.fromkeys(("form", "kernels", "kl_mean", "kl_p99", "top1", "tokens")),
            "absent": why}  # fmt: skip


def _model_section(weights: str) -> dict[str, Any]:
    """A file keeps its own format; bf16 is what safetensors hold and needs no word either."""
    return {"dtype": "bfloat16"} | ({} if weights in ("bf16", "gguf") else {"weights": weights})


def _engine_section(kv: str) -> dict[str, Any]:
    return {} if kv == "bf16" else {"kv_dtype": kv}


def _load(bench: QualityBench, path: Path, model: dict[str, Any], engine: dict[str, Any]) -> LoadedModel:
    """Raises ConfigError for what this build does not know."""
    blocks = blocks_for(bench.window, BLOCK) + SPARE_BLOCKS
    config = config_from_dict(
        {"model": {"path": str(path), **model}, "engine": {"block_size": BLOCK, "num_blocks": blocks, **engine}}
    )
    return load(path, config.model, config.engine, threads=bench.threads, progress=NullProgress())


def print_quality_bench(document: dict[str, Any]) -> None:
    sample = document["sample"]
    note(f"{sample['tokens']:,} tokens in {sample['windows']} windows of {', '.join(sample['files'])}")
    rows = [
        (row["weights"], row["form"], row["kv"], row["kernels"], _small(row["kl_mean"]), _small(row["kl_p99"]),
         None if row["top1"] is None else f"{row['top1']:.2%}")
        for row in document["rows"]
    ]  # fmt: skip
    print_table("against float32", COLUMNS, rows, caption(document["meta"]))
    for baseline in dict.fromkeys(row["baseline"] for row in document["rows"] if row["baseline"]):
        note(f"baseline: {baseline}")
    for row in document["rows"]:
        if row["absent"]:
            note(f"absent: {row['weights']} weights, {row['kv']} KV: {row['absent']}")


def _small(value: float | None) -> str | None:
    return None if value is None else f"{value:.5f}"
