"""A GGUF file as an ordinary Hugging Face directory, its codes written out as floats or left where they lie.

    import_gguf    config, tokenizer, safetensors: bfloat16 holds Q4 and Q8 values to 8 bits, float32 every bit
    prepare_gguf   config and tokenizer only; the weights are read from the file itself, codes as codes
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from kvrelay.core.progress import Progress
from kvrelay.model.gguf_checkpoint import GgufCheckpoint
from kvrelay.model.gguf_file import GgufFile
from kvrelay.model.gguf_tokenizer import write_tokenizer
from kvrelay.model.obtain import GGUF_INDEX, GGUF_LINK


def import_gguf(
    path: Path, directory: Path, progress: Progress, *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Fills `directory` (which exists). Raises ConfigError for an unsupported model."""
    file = GgufFile(path)
    progress.start("convert weights", len(file.tensors))
    tensors: dict[str, torch.Tensor] = {}
    with GgufCheckpoint(path, file.tensors) as checkpoint:
        for name in checkpoint.names:
            values = checkpoint.read_floats(name)
            tensors[name] = values if values.ndim == 1 else values.to(dtype)  # a norm: small, kept as it is
            progress.advance(1)
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    progress.done()
    _describe(file, directory)


def prepare_gguf(path: Path, directory: Path) -> None:
    """Fills `directory` (which exists) with what the file says beside its weights, and with where those lie.

    Raises ConfigError."""
    file = GgufFile(path)
    _describe(file, directory)
    (directory / GGUF_LINK).symlink_to(path)
    (directory / GGUF_INDEX).write_bytes(msgspec.json.encode(file.tensors))


def _describe(file: GgufFile, directory: Path) -> None:
    write_tokenizer(file.metadata, directory)
    config = file.config
    _write_json(directory / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}
    _write_json(directory / "generation_config.json", ids)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")
