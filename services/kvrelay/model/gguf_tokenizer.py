"""The byte-level BPE tokenizer inside a GGUF file as `tokenizer.json`, which the `tokenizers` library loads alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from kvrelay.core.errors import ConfigError

CONTROL, USER_DEFINED = 3, 4
"""Token types of the GGUF specification that stand outside the merges."""


class _Metadata(Protocol):
    def get(self, key: str, default: Any = None) -> Any: ...

    def require(self, key: str) -> Any: ...


def write_tokenizer(metadata: _Metadata, directory: Path) -> None:
    """tokenizer.json and tokenizer_config.json with the chat template. Raises ConfigError for other tokenizers."""
    if metadata.require("tokenizer.ggml.model") != "gpt2":
        raise ConfigError(f"GGUF tokenizer {metadata.get('tokenizer.ggml.model')!r} is not read; supported: gpt2")
    tokens: list[str] = metadata.require("tokenizer.ggml.tokens")
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    merges = [tuple(pair.split(" ", 1)) for pair in metadata.get("tokenizer.ggml.merges") or []]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata.get("tokenizer.ggml.pre", "default"))
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            tokenizer.add_special_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
    bos = _token(metadata, tokens, "bos")
    if metadata.get("tokenizer.ggml.add_bos_token", False) and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokens.index(bos))]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": _token(metadata, tokens, "eos"),
        "pad_token": _token(metadata, tokens, "padding"),
        "unk_token": _token(metadata, tokens, "unknown"),
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    known = {key: value for key, value in settings.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(known, indent=2, ensure_ascii=False) + "\n")


def _token(metadata: _Metadata, tokens: list[str], name: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return None if index is None else tokens[index]


def _pre_tokenizer(name: str) -> Any:
    """How text is cut before the merges. GPT-2's rule; SmolLM cuts every digit out first."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("default", "gpt-2"):
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    raise ConfigError(f"GGUF pre-tokenizer {name!r} is not read; supported: gpt-2, smollm")
