"""Which bytes a token id stands for. Streams of ids become text through bytes, never through per-token strings.

Two families of tokenizer are understood, told apart by the decoder in tokenizer.json:

    ByteLevel                         each character of a token's name is one byte (GPT-2, Llama 3, Qwen, SmolLM)
    Metaspace / Replace, ByteFallback  U+2581 is a space, `<0xAB>` one byte, the rest plain UTF-8 (Llama 2, Mistral)

Control tokens (added tokens marked special) have no bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from kvrelay.core.errors import ConfigError

SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes_table(description: Mapping[str, Any], vocab: Mapping[str, int]) -> list[bytes]:
    """Index: token id. `description` is tokenizer.json, `vocab` every name with its id. Raises ConfigError."""
    to_bytes = _converter(_decoder_types(description.get("decoder")))
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for name, token_id in vocab.items():
        table[token_id] = to_bytes(name)
    for added in description.get("added_tokens") or ():
        table[added["id"]] = b"" if added["special"] else added["content"].encode()
    return table


def _decoder_types(decoder: Mapping[str, Any] | None) -> set[str]:
    if not decoder:
        return set()
    types = {str(decoder.get("type"))}
    for inner in decoder.get("decoders") or ():
        types |= _decoder_types(inner)
    return types


def _converter(decoder_types: set[str]) -> Callable[[str], bytes]:
    if "ByteLevel" in decoder_types:
        return _byte_level
    if decoder_types & {"Metaspace", "ByteFallback"}:
        return _sentence_piece
    found = ", ".join(sorted(decoder_types)) or "none"
    raise ConfigError(
        f"this tokenizer's decoder is not supported (found: {found}); "
        "supported: ByteLevel, Metaspace, and sequences with ByteFallback"
    )


def _byte_characters() -> dict[str, int]:
    """The map of GPT-2: printable Latin-1 stands for itself, the other bytes are moved to U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


def _byte_level(name: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in name])
    except KeyError:
        return name.encode()


def _sentence_piece(name: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(name)
    return bytes([int(match.group(1), 16)]) if match else name.replace(SPACE_MARK, " ").encode()
