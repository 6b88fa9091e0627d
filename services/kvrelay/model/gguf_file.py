"""What a GGUF file says about its model, in our words: names, shapes, config. Llama architecture.

What GGUF does differently, and whoever reads the tensors must undo:
  - its rows of q and k are reordered head by head: pairs (2i, 2i + 1) turn together; ours turn (i, i + head_dim/2)
  - a tied head is simply absent
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from kvrelay.core.errors import ConfigError

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
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rope frequencies, as Llama 3.1 has them. All ones says nothing."""


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


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in the file, and as what."""

    type: str
    """Name in the GGUF specification, such as "Q4_1"."""
    shape: tuple[int, ...]
    """As torch would say it: [rows, columns], or one size."""
    offset: int
    num_bytes: int
    num_heads: int
    """Whose rows are paired in the file; 0: rows are where ours are."""


class GgufFile:
    """A file's own description: `config` as config.json would say it, `tensors` by their safetensors names.

    Reading it takes seconds, most of them for the tokenizer; `obtain` does it once and keeps what it says.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if it cannot become a supported model."""
        try:
            reader = GGUFReader(str(path))
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ConfigError(f"cannot read {path} as GGUF: {error}; is it whole?") from error
        if reader.byte_order == "S":  # swapped; whoever maps the tensors would not notice
            raise ConfigError(f"{path} is a GGUF in the other byte order; convert it on a machine like this one")
        self.metadata = Metadata(reader, path)
        architecture = self.metadata.require("general.architecture")
        if architecture != "llama":
            raise ConfigError(f"{path}: GGUF architecture {architecture!r} is not supported; supported: llama")
        for tensor in reader.tensors:
            if tensor.name == ROPE_FACTORS and (tensor.data != 1.0).any():
                raise ConfigError(f"{path}: scaled rope frequencies of a GGUF are not read; take its safetensors")
        stored = {tensor.name: tensor for tensor in reader.tensors if tensor.name != ROPE_FACTORS}
        self.config = _config(self.metadata, tied="output.weight" not in stored)
        self.tensors = {_target(name): self._stored(name, tensor) for name, tensor in stored.items()}
        for name, shape in _shapes(self.config).items():
            if name not in self.tensors:
                raise ConfigError(f"{path}: the GGUF has no {name}; is it one part of several?")
            if self.tensors[name].shape != shape:
                held = list(self.tensors[name].shape)
                raise ConfigError(f"{path}: {name} has shape {held}; the file's own description asks for {list(shape)}")

    def _stored(self, name: str, tensor: Any) -> StoredTensor:
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
        return StoredTensor(
            type=tensor.tensor_type.name,
            shape=tuple(int(size) for size in reversed(tensor.shape)),
            offset=int(tensor.data_offset),
            num_bytes=int(tensor.n_bytes),
            num_heads=self.config[heads] if heads else 0,
        )


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


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor that such a model consists of."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,), "attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden),
        "attn_output": (hidden, q), "ffn_norm": (hidden,), "ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["output.weight"] = (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"blk.{index}.{part}.weight": shape for part, shape in layer.items()}
    return {_target(name): shape for name, shape in shapes.items()}


def _rope_scaling(metadata: Metadata) -> dict[str, Any] | None:
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise ConfigError(f"rope scaling {kind!r} of a GGUF is not read; take the model's safetensors instead")
    return {"rope_type": "linear", "factor": metadata.require("llama.rope.scaling.factor")}


def _target(name: str) -> str:
    """Our name of the file's tensor. Raises ConfigError if a Llama model has no place for it."""
    stem, _, kind = name.rpartition(".")
    if kind == "weight" and stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.weight"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if kind != "weight" or block != "blk" or part not in LAYER_NAMES:
        raise ConfigError(f"the GGUF's tensor {name} has no place in a Llama model")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
