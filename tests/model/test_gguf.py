"""A GGUF served from its own tensors, and float weights quantised at load: the same numbers, fewer bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFEndian, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvrelay.core.batch import StepPlan
from kvrelay.core.config import EngineSettings, ModelSettings
from kvrelay.core.errors import ConfigError
from kvrelay.core.progress import NullProgress
from kvrelay.model.gguf_checkpoint import GgufCheckpoint
from kvrelay.model.gguf_file import GgufFile
from kvrelay.model.load import LoadedModel, load
from kvrelay.model.obtain import obtain, obtain_gguf
from kvrelay_kernels.linear.quantised import GROUP, QuantisedWeight, quantise_groups, quantise_rows
from tests.model.rig import Sequences, make_row, token_ids
from tests.support.gguf import write_gguf
from tests.support.tiny import write_model_t

ALL_FOUR_BITS = dict.fromkeys(
    ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), "Q4_1"
) | {"token_embd": "Q8_0", "output": "Q8_0"}
PROMPT = [256, *b"a baton of four bits"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_t(tmp_path_factory.mktemp("tiny"), ffn=256)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def loaded(directory: Path, weights: str = "auto", dtype: str = "float32") -> LoadedModel:
    return load(directory, ModelSettings(dtype=dtype, weights=weights), EngineSettings(num_blocks=16), threads=1)


def logits(model: LoadedModel) -> Tensor:
    """Of every token of the prompt, in one chunk."""
    return model.runner.every_logits(StepPlan(0, (make_row(PROMPT, 0, len(PROMPT), [1, 2]),)))


def floats(weight: Tensor | QuantisedWeight) -> Tensor:
    return weight.dequantise() if isinstance(weight, QuantisedWeight) else weight


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16", "F32"])
def test_every_tensor_is_what_the_file_says(tiny: Path, tmp_path: Path, kind: str) -> None:
    values = write_gguf(tmp_path / "m.gguf", tiny, types=dict.fromkeys(ALL_FOUR_BITS, kind))
    with GgufCheckpoint(tmp_path / "m.gguf", GgufFile(tmp_path / "m.gguf").tensors) as checkpoint:
        assert set(checkpoint.names) == set(values)
        for name, expected in values.items():
            assert torch.equal(floats(checkpoint.read(name)), torch.from_numpy(np.ascontiguousarray(expected)).float())
        assert checkpoint.is_coded("lm_head.weight") == kind.startswith("Q")
        assert not checkpoint.is_coded("model.norm.weight")


def test_codes_multiply_like_the_numbers_they_stand_for(tiny: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny, types=ALL_FOUR_BITS)
    own, written_out = loaded(tmp_path / "m.gguf"), loaded(tmp_path / "m.gguf", "bf16")
    assert isinstance(own.weights.embedding, QuantisedWeight)
    assert isinstance(written_out.weights.embedding, Tensor)
    wanted = logits(written_out)
    assert (logits(own) - wanted).abs().max() < 0.02 * wanted.abs().max()
    answers = [token_ids(Sequences(model).generate([PROMPT], 12)[0]) for model in (own, written_out)]
    assert answers[0] == answers[1]


def test_codes_beside_floats_are_written_out_with_them(tiny: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny, types={"attn_q": "Q4_1", "attn_k": "F16", "ffn_gate": "Q8_0"})
    own, written_out = loaded(tmp_path / "m.gguf"), loaded(tmp_path / "m.gguf", "bf16")
    assert torch.equal(logits(own), logits(written_out))


def test_k_quants_are_written_out(tiny: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny, types=ALL_FOUR_BITS | {"ffn_down": "Q6_K"})
    own, written_out = loaded(tmp_path / "m.gguf"), loaded(tmp_path / "m.gguf", "bf16")
    assert own.capacity.startswith("weights Q4_1+Q6_K+Q8_0; ")
    wanted = logits(written_out)
    assert (logits(own) - wanted).abs().max() < 0.02 * wanted.abs().max()


@pytest.mark.parametrize(("weights", "least", "most"), [("int8", 1e-4, 0.1), ("int4", 0.01, 0.6)])
def test_float_weights_quantised_at_load(tiny: Path, weights: str, least: float, most: float) -> None:
    model, wanted = loaded(tiny, weights), logits(loaded(tiny))
    assert model.weights.form == weights
    assert least < float((logits(model) - wanted).abs().max() / wanted.abs().max()) < most
    table = model.weights.embedding
    assert isinstance(table, QuantisedWeight)
    assert table.bits == 8, "four bits are too few for an embedding"


def test_bf16_means_floats_as_they_are(tiny: Path) -> None:
    assert torch.equal(logits(loaded(tiny, "bf16")), logits(loaded(tiny)))


def test_other_weights_are_another_identity(tiny: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny, types=ALL_FOUR_BITS)
    models = [loaded(tiny, "bf16"), loaded(tiny, "int8"), loaded(tiny, "int4"), loaded(tmp_path / "m.gguf"),
              loaded(tmp_path / "m.gguf", "int8")]  # fmt: skip
    assert len({model.identity.fingerprint() for model in models}) == len(models)
    assert loaded(tiny).identity == models[0].identity
    assert models[-1].weights.form == "int8 of Q4_1+Q8_0"
    assert loaded(tmp_path / "m.gguf", dtype="bfloat16").identity == models[3].identity


def test_a_directory_with_one_gguf_and_a_file_lead_to_the_same(tiny: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    write_gguf(home / "small.gguf", tiny, types=ALL_FOUR_BITS)
    directory = obtain(str(home))
    assert directory == obtain(str(home / "small.gguf"))
    assert directory.name == "small"
    assert loaded(directory).served_name == "small"
    assert loaded(directory).weights.form == "Q4_1+Q8_0"
    (home / "other.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"other\.gguf, small\.gguf; give --model one of them"):
        obtain(str(home))
    (home / "small.gguf").unlink()
    with pytest.raises(ConfigError, match="moved or deleted"):
        loaded(directory)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(lambda data: b"GGML" + data[4:], "as GGUF", id="magic"),
        pytest.param(cut, "as GGUF", id="half of it"),
        pytest.param(lambda data: data[:40], "as GGUF", id="its first bytes"),
        pytest.param(lambda _: b"", "as GGUF", id="empty"),
    ],
)
def test_damaged_files(tiny: Path, tmp_path: Path, damage: Any, words: str) -> None:
    write_gguf(tmp_path / "m.gguf", tiny)
    (tmp_path / "m.gguf").write_bytes(damage((tmp_path / "m.gguf").read_bytes()))
    with pytest.raises(ConfigError, match=words):
        obtain_gguf(tmp_path / "m.gguf", NullProgress())
    assert not list((tmp_path / "cache").rglob("config.json"))


def test_a_missing_tensor_and_a_missing_file(tiny: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny, without="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ConfigError, match=r"has no model\.layers\.1\.mlp\.up_proj\.weight"):
        obtain(str(tmp_path / "m.gguf"))
    with pytest.raises(ConfigError, match="there is no file"):
        obtain(str(tmp_path / "none.gguf"))
    with pytest.raises(ConfigError, match="known: auto, bf16, int8, int4"):
        loaded(tiny, "int3")


def test_the_other_byte_order_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(str(tmp_path / "m.gguf"), "llama", endianess=GGUFEndian.BIG)
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="in the other byte order"):
        obtain(str(tmp_path / "m.gguf"))


def test_a_tensor_of_another_shape_is_refused_before_anything_is_kept(tmp_path: Path) -> None:
    source = write_model_t(tmp_path / "other", ffn=256)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"intermediate_size": 192}))
    write_gguf(tmp_path / "m.gguf", source)
    with pytest.raises(ConfigError, match=r"shape \[256, 64\]; the file's own description asks for \[192, 64\]"):
        obtain(str(tmp_path / "m.gguf"))
    assert not list((tmp_path / "cache").rglob("config.json"))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31), st.sampled_from([0.0, 1e-6, 1.0, 1e4]))
def test_no_number_is_off_by_more_than_half_a_step(rows: int, groups: int, seed: int, scale: float) -> None:
    weight = scale * torch.randn(rows, groups * GROUP, generator=torch.Generator().manual_seed(seed))
    for quantised in (quantise_rows(weight), quantise_groups(weight)):
        off = (quantised.dequantise() - weight).abs().view(rows, -1, quantised.group)
        assert (off <= quantised.scales.unsqueeze(2) * 0.5001 + 1e-6 * scale).all()
        assert quantised.codes.min() >= (-127 if quantised.bits == 8 else 0)
        assert quantised.codes.max() <= (127 if quantised.bits == 8 else 15)


def test_scaled_rope_is_refused_not_left_out(tiny: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "plain.gguf", tiny, rope_factors=[1.0] * 8)
    assert loaded(tmp_path / "plain.gguf").weights.form
    write_gguf(tmp_path / "scaled.gguf", tiny, rope_factors=[1.0] * 4 + [8.0] * 4)
    with pytest.raises(ConfigError, match="scaled rope frequencies"):
        obtain(str(tmp_path / "scaled.gguf"))


def test_a_link_named_like_ours_is_a_file_like_any_other(tiny: Path, tmp_path: Path) -> None:
    """As in a snapshot of the hub's cache."""
    write_gguf(tmp_path / "blob.gguf", tiny)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.gguf").symlink_to(tmp_path / "blob.gguf")
    assert loaded(obtain(str(snapshot))).weights.form
