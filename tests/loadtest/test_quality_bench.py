"""`bench quality`: divergences that can be worked out by hand, and a whole run on a tiny model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.core.config import EngineSettings, ModelSettings
from kvrelay.core.errors import ConfigError
from kvrelay.core.progress import NullProgress, Progress
from kvrelay.model.load import load
from kvrelay_loadtest import quality_bench
from kvrelay_loadtest.drift import Drift, NotFinite, compare, every_logits, log_probabilities, windows_of
from kvrelay_loadtest.quality_bench import QualityBench, check, print_quality_bench, read_texts, run_quality_bench
from tests.support.tiny import write_model_t

TEXT = "A text of which each byte is a token of the tiny model, long enough for two windows of forty-eight."


def _bench(directory: Path, tmp_path: Path, **changes: Any) -> QualityBench:
    (tmp_path / "text.txt").write_text(TEXT)
    bench = QualityBench(
        model=str(directory), weights=("bf16",), kv=("bf16",), text=str(tmp_path / "text.txt"), window=48, chunk=20,
        threads=1,
    )  # fmt: skip
    return dataclasses.replace(bench, **changes)


def test_divergence_and_agreement_of_distributions_worked_out_by_hand() -> None:
    halves, quarters = torch.tensor([[0.5, 0.5, 1e-30]]).log(), torch.tensor([[0.25, 0.75, 1e-30]]).log()
    drift = compare(log_probabilities(halves), quarters)
    assert drift.kl == (pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-5),)
    assert compare(log_probabilities(quarters), quarters + 7.0).kl == (pytest.approx(0.0, abs=1e-9),)
    assert compare(log_probabilities(quarters), quarters).top1 == 1.0
    assert compare(log_probabilities(quarters), -quarters).top1 == 0.0


def test_parts_add_up() -> None:
    whole = Drift.total([Drift((1.0, 3.0), 1), Drift((2.0,), 1)])
    assert (whole.count, whole.mean, whole.p99, whole.top1) == (3, 2.0, pytest.approx(2.98), pytest.approx(2 / 3))


def test_numbers_that_are_none_are_not_compared() -> None:
    with pytest.raises(NotFinite):
        compare(torch.zeros(1, 2), torch.tensor([[0.0, math.nan]]))


def test_no_window_spans_two_texts_and_their_sum_is_bounded() -> None:
    texts = [list(range(50)), list(range(100, 140))]
    assert [(window[0], len(window)) for window in windows_of(texts, 32, 1000)] == [(0, 32), (100, 32), (32, 18)]
    assert [(window[0], len(window)) for window in windows_of(texts, 32, 60)] == [(0, 32), (100, 28)]
    assert windows_of([list(range(10))], 32, 1000) == []


def test_logits_do_not_depend_on_how_the_window_is_chunked(tmp_path: Path) -> None:
    model = load(write_model_t(tmp_path), ModelSettings(dtype="float32"), EngineSettings(num_blocks=8))
    window = list(TEXT.encode())
    whole = every_logits(model, window, 1000)
    assert tuple(whole.shape) == (len(window), model.num_tokens)
    assert torch.allclose(every_logits(model, window, 7), whole, atol=1e-4)
    other = every_logits(model, [*window[:-1], 0], 1000)
    assert torch.allclose(other[:-1], whole[:-1], atol=1e-4)
    assert not torch.allclose(other[-1], whole[-1], atol=1e-2)


def test_bf16_drifts_a_little_and_every_other_format_says_why_it_is_absent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = _bench(write_model_t(tmp_path / "t"), tmp_path, weights=("bf16", "gguf"))
    document = run_quality_bench(bench, NullProgress())
    bf16, gguf = document["rows"]
    assert document["sample"] == {"files": ["text.txt"], "tokens": 96, "windows": 2}
    assert (bf16["weights"], bf16["kv"], bf16["tokens"], bf16["absent"]) == ("bf16", "bf16", 96, None)
    assert 0 < bf16["kl_mean"] <= bf16["kl_p99"] < 1.0
    assert 0.5 < bf16["top1"] <= 1.0
    assert "float32" in bf16["baseline"]
    assert "--gguf" in gguf["absent"]
    print_quality_bench(document)
    shown = capsys.readouterr()
    assert "bf16" in shown.out
    assert "absent: gguf weights" in shown.err


def test_a_gguf_is_compared_with_its_own_numbers_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two directories stand for the file and for what is written out of it."""
    ours, exact = write_model_t(tmp_path / "a"), write_model_t(tmp_path / "b", seed=1)

    @contextmanager
    def written_out(file: Path, progress: Progress) -> Iterator[Path]:
        yield {"same": ours, "other": exact}[wanted]

    monkeypatch.setattr(quality_bench, "_written_out", written_out)
    found = {}
    for wanted in ("same", "other"):
        bench = _bench(ours, tmp_path, weights=("gguf",), gguf=str(ours))
        found[wanted] = run_quality_bench(bench, NullProgress())["rows"][0]
    assert found["same"]["kl_mean"] < 0.1 < found["other"]["kl_mean"]
    assert "codes" in found["same"]["baseline"]


@pytest.mark.parametrize(("changes", "why"), [({"limit_s": 0.0}, "within 0 s"), ({"kv": ("int8",)}, None)])
def test_what_was_not_measured_has_no_numbers(tmp_path: Path, changes: dict[str, Any], why: str | None) -> None:
    row = run_quality_bench(_bench(write_model_t(tmp_path / "t"), tmp_path, **changes), NullProgress())["rows"][0]
    if why is None:  # a KV format: measured where this build has it
        assert (row["kl_mean"] is None) == (row["absent"] is not None)
    else:
        assert why in row["absent"]
        assert row["kl_mean"] is None


@pytest.mark.parametrize(
    ("change", "word"),
    [({"weights": ("nf2",)}, "nf2"), ({"kv": ("fp3",)}, "fp3")],
)
def test_formats_nobody_knows_are_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        check(dataclasses.replace(QualityBench(), **change))


def test_the_sample_is_shipped_and_large_enough() -> None:
    texts = read_texts("")
    assert {"code.txt", "story.txt"} <= set(texts)
    assert sum(map(len, texts.values())) > 12_000
    with pytest.raises(ConfigError, match="nowhere"):
        read_texts("/nowhere.txt")
