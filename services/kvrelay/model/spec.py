"""What a decoder is made of, read from a Hugging Face `config.json`: one decoder, parametrised, for five families.

Plain JSON: transformers is not imported. What cannot be computed is refused at start, by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.core.errors import ConfigError
from kvrelay.model.rope import RopeSpec, read_rope

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""SmolLM and SmolLM2 are Llama by architecture."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    family: str
    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    """Rows of the embedding, padding included."""
    max_context: int
    rms_eps: float
    rope: RopeSpec
    tied: bool
    """The head is the embedding."""
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    """Per layer: tokens a query sees, itself included; 0: all."""
    bos_token_id: int | None
    eos_token_ids: frozenset[int]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


def read_spec(directory: Path) -> DecoderSpec:
    """Raises ConfigError if `directory` holds no model or one that is not supported."""
    config = read_json(directory / "config.json")
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return spec_from_config(config, generation)


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} holds no {path.name}: it is no model as Hugging Face saves it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return data


def spec_from_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> DecoderSpec:
    family = _family(config)
    _refuse_unsupported(config)
    hidden, num_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ConfigError(f"{num_heads} attention heads cannot share {num_kv_heads} KV heads evenly")
    head_dim = config.get("head_dim") or hidden // num_heads
    max_context = _count(config, "max_position_embeddings")
    bias = family in ("llama", "qwen3") and bool(config.get("attention_bias", False))
    eos = (generation or {}).get("eos_token_id", config.get("eos_token_id"))
    return DecoderSpec(
        family=family,
        num_layers=_count(config, "num_hidden_layers"),
        hidden=hidden,
        ffn=_count(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab=_count(config, "vocab_size"),
        max_context=max_context,
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=read_rope(config, max_context),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or bias,
        o_bias=bias,
        qk_norm=family == "qwen3",
        windows=_windows(config, family),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=_ids(eos),
    )


def _family(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    named = ", ".join(names) or str(config.get("model_type", "unnamed"))
    raise ConfigError(f"architecture {named} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"activation {activation!r} is not supported; supported: silu")
    if config.get("mlp_bias"):
        raise ConfigError("mlp_bias is not supported: the MLP of the supported families has no bias")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unnamed")
        raise ConfigError(f"checkpoints quantised with {method} are not supported; give float weights")


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {name} must be a positive integer, found {value!r}")
    return value


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list) else frozenset({int(value)})


def _windows(config: Mapping[str, Any], family: str) -> tuple[int, ...]:
    """Mistral: all layers, if a window is given. Qwen: only when switched on, by layer type or from a layer on."""
    num_layers = _count(config, "num_hidden_layers")
    window = int(config.get("sliding_window") or 0)
    if family == "llama" or window == 0:
        return (0,) * num_layers
    if family == "mistral":
        return (window,) * num_layers
    if not config.get("use_sliding_window", False):
        return (0,) * num_layers
    types = config.get("layer_types")
    if types is not None:
        return tuple(window if kind == "sliding_attention" else 0 for kind in types)
    first = config.get("max_window_layers", num_layers)
    return tuple(window if layer >= first else 0 for layer in range(num_layers))
