"""How many ids a tokenizer knows. The head of a model is often padded past that; such ids must never be drawn."""

from __future__ import annotations

from pathlib import Path

from kvrelay.core.errors import ConfigError
from kvrelay.model.spec import read_json


def count_tokens(directory: Path) -> int:
    """The largest id of `tokenizer.json` plus one. Raises ConfigError if there is no readable tokenizer."""
    data = read_json(directory / "tokenizer.json")
    vocab = data.get("model", {}).get("vocab")
    if isinstance(vocab, dict):
        ids = list(vocab.values())
    elif isinstance(vocab, list):
        ids = list(range(len(vocab)))
    else:
        raise ConfigError(f"{directory / 'tokenizer.json'}: its model has no vocabulary")
    ids.extend(token["id"] for token in data.get("added_tokens") or [])
    return int(max(ids)) + 1
