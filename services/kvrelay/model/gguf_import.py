"""A GGUF file as an ordinary Hugging Face directory: config, safetensors, tokenizer. Llama architecture.

What GGUF does differently, and is undone here:
  - its rows of q and k are reordered head by head: pairs (2i, 2i + 1) turn together; ours turn (i, i + head_dim/2)
  - weights are quantised in blocks; they are expanded to bfloat16, which holds Q4 and Q8 values to 8 bits
  - a tied head is simply absent
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file

from kvrelay.core.errors import ConfigError
from kvrelay.core.progress import Progress
from kvrelay.model.gguf_tokenizer import write_tokenizer

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IGNORED = frozenset({"rope_freqs.weight"})
"""Derived from the config here."""


class Metadata:
    """The key-value part of a GGUF file."""

    def __init__(self, reader: Any, path: Path) -> None:
        self._fields = reader.fields
        self._path = path

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self._path}: the GGUF has no {key}")
        return value


def import_gguf(
    path: Path, directory: Path, progress: Progress, *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Fills `directory` (which exists); float32 keeps every bit. Raises ConfigError for an unsupported model."""
    try:
        reader = GGUFReader(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path} as GGUF: {error}") from error
    metadata = Metadata(reader, path)
    architecture = metadata.require("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"{path}: GGUF architecture {architecture!r} is not supported; supported: llama")
    names = {tensor.name for tensor in reader.tensors}
    config = _config(metadata, tied="output.weight" not in names)
    progress.start("convert weights", len(names))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(reader, config, dtype):
        tensors[name] = tensor
        progress.advance(1)
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    progress.done()
    write_tokenizer(metadata, directory)
    _write_json(directory / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}
    _write_json(directory / "generation_config.json", ids)


def _config(metadata: Metadata, tied: bool) -> dict[str, Any]:
    hidden, num_heads = metadata.require("llama.embedding_length"), metadata.require("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata.require("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": metadata.require("llama.feed_forward_length"),
        "num_hidden_layers": metadata.require("llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", num_heads),
        "head_dim": metadata.get("llama.attention.key_length", hidden // num_heads),
        "hidden_act": "silu",
        "max_position_embeddings": metadata.require("llama.context_length"),
        "rms_norm_eps": metadata.require("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.get("llama.rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(metadata),
        "tie_word_embeddings": tied,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }


def _rope_scaling(metadata: Metadata) -> dict[str, Any] | None:
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise ConfigError(f"rope scaling {kind!r} of a GGUF is not read; take the model's safetensors instead")
    return {"rope_type": "linear", "factor": metadata.require("llama.rope.scaling.factor")}


def _tensors(reader: Any, config: dict[str, Any], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        if tensor.name in IGNORED:
            continue
        stem, _, kind = tensor.name.rpartition(".")
        if kind != "weight":
            raise ConfigError(f"the GGUF's tensor {tensor.name} has no place in a Llama model")
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)  # F32 would be a view
        part = stem.rpartition(".")[2]
        if part in heads:
            values = _unpair(values, heads[part])
        name = f"{_target(stem)}.weight"
        if values.ndim == 1:  # a norm: small, kept as it is
            yield name, torch.from_numpy(values)
        else:
            yield name, torch.from_numpy(values).to(dtype)


def _target(stem: str) -> str:
    if stem in TOP_NAMES:
        return TOP_NAMES[stem]
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or part not in LAYER_NAMES:
        raise ConfigError(f"the GGUF's tensor {stem} has no place in a Llama model")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}"


def _unpair(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rows [head, i, half] of the file → [head, half, i]."""
    rows, columns = values.shape
    paired = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(rows, columns))


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")
