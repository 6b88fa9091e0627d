"""Fingerprints of what makes two KV blocks mean the same. A few megabytes are read, whatever the model's size."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from kvrelay.core.handoff import KvIdentity
from kvrelay.core.kv import KvLayout
from kvrelay.model.checkpoint import weight_files
from kvrelay.model.rope import RopeSpec
from kvrelay.model.spec import DecoderSpec

NUM_SAMPLES, SAMPLE_BYTES = 64, 4096
"""Per weights file: evenly spread pieces. A retrained model differs in nearly every one."""

GGUF_HEAD_BYTES = 1 << 20
"""What it says of itself begins there; how long that is, is not said in front."""


def identify(directory: Path, spec: DecoderSpec, layout: KvLayout, form: str = "") -> KvIdentity:
    """`form`: see `Weights.form`; other weights make other KV."""
    return KvIdentity(
        model=_model_digest(directory, spec, form),
        rope=_digest([json.dumps(asdict(spec.rope), sort_keys=True).encode()]),
        tokenizer=_digest([(directory / "tokenizer.json").read_bytes()]),
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
    )


def _model_digest(directory: Path, spec: DecoderSpec, form: str) -> str:
    """The spec without what has its own digest or only bounds requests, the files' headers, samples of their bytes."""
    shape = asdict(replace(spec, rope=RopeSpec(), max_context=0, eos_token_ids=frozenset()))
    shape["eos_token_ids"] = []
    digest = hashlib.blake2b(json.dumps(shape, sort_keys=True).encode() + form.encode(), digest_size=16)
    for path in weight_files(directory):
        for piece in _pieces(path):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    """A safetensors file's header (names, shapes, dtypes), or the start of a GGUF, and samples of the data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = file.read(8)
        yield length
        header_bytes = GGUF_HEAD_BYTES if length[:4] == b"GGUF" else struct.unpack("<Q", length)[0]
        yield file.read(header_bytes)
        begin = 8 + header_bytes
        step = max(SAMPLE_BYTES, (size - begin) // NUM_SAMPLES)
        for offset in range(begin, size, step):
            file.seek(offset)
            yield file.read(SAMPLE_BYTES)


def _digest(parts: list[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
