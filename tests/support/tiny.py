"""Tiny models made by code: Model T (random) and Model C (chain), with a byte-level tokenizer. Nothing is downloaded.

    Model T   2 layers, hidden 64, 4 query / 2 KV heads of 16, float32, context 256, vocabulary 262 padded to 320.
              Random weights from a fixed seed, wide enough that greedy gaps are far above float32 noise.
    Model C   the same shapes; attention and MLP write zeros, so the next token depends on the last one alone.

    ids 0–255 are the bytes; then <|bos|> 256, <|eos|> 257, <|system|>, <|user|>, <|assistant|>, <|end|> 261.

Written with numpy and safetensors: no torch, a few milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

BOS, EOS, SYSTEM, USER, ASSISTANT, END = range(256, 262)
MARKERS = ("<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
VOCAB, PADDED_VOCAB, CONTEXT = 256 + len(MARKERS), 320, 256

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] in ('system', 'developer') %}<|system|>"
    "{% elif message['role'] == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}"
    "{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}

Tensors = dict[str, "np.ndarray[Any, Any]"]


def write_model_t(
    directory: Path,
    *,
    family: str = "llama",
    seed: int = 0,
    num_layers: int = 2,
    hidden: int = 64,
    ffn: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    tied: bool = False,
    eos_token_ids: Sequence[int] = (EOS,),
    num_shards: int = 1,
    poison_padding: bool = False,
    **config: Any,
) -> Path:
    """Writes a Hugging Face directory and returns it. Further keywords go into `config.json` as they are.

    `poison_padding` gives the ids past the tokenizer the largest logits of all: a sampler that forgets to mask
    them is caught at once. Without it their logits are 0 and transformers needs no mask to agree.
    """
    shape = _config(family, num_layers, hidden, ffn, num_heads, num_kv_heads, head_dim, tied, eos_token_ids) | config
    rng = np.random.default_rng(seed)
    tensors = _random_tensors(rng, shape, family)
    head = tensors["model.embed_tokens.weight" if shape["tie_word_embeddings"] else "lm_head.weight"]
    head[VOCAB:] = 0.0
    if poison_padding:
        head[VOCAB:] = 4.0 * rng.standard_normal(head[VOCAB:].shape)
    return _write(directory, shape, tensors, num_shards)


def write_model_c(
    directory: Path,
    chain: bytes | Sequence[int] | Mapping[int, int],
    *,
    default: int | None = None,
    eos_token_ids: Sequence[int] = (EOS,),
    **config: Any,
) -> Path:
    """A model whose greedy successor of token t is next[t].

    A chain `abc` means: a → b → c → EOS, and every other token → a, so that any prompt that does not end inside the
    chain is answered with it. A mapping names next[t] itself; `default` (EOS) follows everything it leaves out.
    """
    if isinstance(chain, Mapping):
        successor = dict(chain)
        fallback = eos_token_ids[0] if default is None else default
    else:
        tokens = list(chain)
        if len(set(tokens)) != len(tokens):
            raise ValueError("a chain's tokens must all be distinct: the last token alone decides the next")
        successor = dict(zip(tokens, [*tokens[1:], eos_token_ids[0]], strict=True))
        fallback = tokens[0] if default is None else default
    shape = _config("llama", 2, 64, 128, 4, 2, 16, False, eos_token_ids) | config
    rng = np.random.default_rng(1)
    tensors = _random_tensors(rng, shape, "llama")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[:] = 0.0
        elif name.endswith("norm.weight"):
            tensor[:] = 1.0
    # Tokens with one successor share one embedding, the head's row of that successor: its own logit is the largest.
    names = rng.standard_normal((PADDED_VOCAB, shape["hidden_size"])).astype(np.float32)
    names /= np.sqrt((names**2).mean(axis=1, keepdims=True))
    tensors["model.embed_tokens.weight"] = names[[successor.get(t, fallback) for t in range(PADDED_VOCAB)]].copy()
    names[VOCAB:] = 0.0
    tensors["lm_head.weight"] = names
    return _write(directory, shape, tensors, 1)


def write_tokenizer(directory: Path, *, chat_template: str | None = CHAT_TEMPLATE, bos: bool = True) -> Path:
    """tokenizer.json and tokenizer_config.json: one id per byte, markers as special tokens, BOS in front."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(_byte_characters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|eos|>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(256 + i): {"content": marker, "special": True, "normalized": False, "lstrip": False, "rstrip": False,
                           "single_word": False}
            for i, marker in enumerate(MARKERS)
        },
    }
    if bos:
        settings["bos_token"] = "<|bos|>"
    if chat_template is not None:
        settings["chat_template"] = chat_template
    _write_json(directory / "tokenizer_config.json", settings)
    return directory


def _byte_characters() -> list[str]:
    """The printable stand-in that byte-level tokenizers use for each byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = dict.fromkeys(range(256), "")
    shifted = 0
    for byte in range(256):
        if byte in printable:
            table[byte] = chr(byte)
        else:
            table[byte] = chr(256 + shifted)
            shifted += 1
    return [table[byte] for byte in range(256)]


def _config(
    family: str, num_layers: int, hidden: int, ffn: int, num_heads: int, num_kv_heads: int, head_dim: int,
    tied: bool, eos_token_ids: Sequence[int],
) -> dict[str, Any]:
    architecture, model_type = ARCHITECTURES[family]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": PADDED_VOCAB,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": BOS,
        "eos_token_id": eos_token_ids[0] if len(eos_token_ids) == 1 else list(eos_token_ids),
        "torch_dtype": "float32",
    }
    if family == "mistral":
        config["sliding_window"] = 48
    if family in ("qwen2", "qwen3"):
        config["use_sliding_window"] = False
    return config


def _random_tensors(rng: np.random.Generator, config: dict[str, Any], family: str) -> Tensors:
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray[Any, Any]:
        return (gain / np.sqrt(columns) * rng.standard_normal((rows, columns))).astype(np.float32)

    def norm(size: int) -> np.ndarray[Any, Any]:
        return (1.0 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    # A tied head would answer each token with itself if the embedding outweighed what the layers add.
    scale = np.float32(0.3 if config["tie_word_embeddings"] else 1.0)
    embedding = scale * rng.standard_normal((config["vocab_size"], hidden), np.float32)
    tensors: Tensors = {"model.embed_tokens.weight": embedding}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        tensors[at + "input_layernorm.weight"] = norm(hidden)
        for name, rows in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = matrix(rows, hidden)
            if family == "qwen2" or config.get("attention_bias"):
                tensors[f"{at}self_attn.{name}_proj.bias"] = np.float32(0.2) * rng.standard_normal(rows, np.float32)
        if family == "qwen3":
            tensors[at + "self_attn.q_norm.weight"] = norm(head_dim)
            tensors[at + "self_attn.k_norm.weight"] = norm(head_dim)
        tensors[at + "self_attn.o_proj.weight"] = matrix(hidden, q_size)
        if config.get("attention_bias"):
            tensors[at + "self_attn.o_proj.bias"] = np.float32(0.2) * rng.standard_normal(hidden, np.float32)
        tensors[at + "post_attention_layernorm.weight"] = norm(hidden)
        tensors[at + "mlp.gate_proj.weight"] = matrix(ffn, hidden)
        tensors[at + "mlp.up_proj.weight"] = matrix(ffn, hidden)
        tensors[at + "mlp.down_proj.weight"] = matrix(hidden, ffn)
    tensors["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden, gain=2.0)
    return tensors


def _write(directory: Path, config: dict[str, Any], tensors: Tensors, num_shards: int) -> Path:
    write_tokenizer(directory)
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]},
    )
    if num_shards == 1:
        save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
        return directory
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, str(directory / file_name), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )
    return directory


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")
