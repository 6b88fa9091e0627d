"""Model T as a GGUF file, in any of its formats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from gguf.quants import quantize as quantise
from safetensors import safe_open

from kvrelay.model.gguf_file import LAYER_NAMES, TOP_NAMES
from tests.support.tiny import MARKERS

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
QUANTISED = {"attn_q": "Q4_1", "ffn_up": "Q8_0", "attn_v": "Q4_1", "token_embd": "Q8_0"}


def pair(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What converters to GGUF do to the rows of q and k."""
    rows, columns = values.shape
    return values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _encoded(stored: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    if kind.name == "F32":
        return np.ascontiguousarray(stored)
    if not kind.name.endswith("_K"):
        return quantise(stored, kind)
    block, size = GGML_QUANT_SIZES[kind]  # no encoder is at hand: any bytes are some numbers, with scales of 1
    shape = (stored.shape[0], stored.shape[1] // block, size)
    raw = np.random.default_rng(5).integers(0, 32, size=shape, dtype=np.uint8)
    raw[:, :, -2:] = np.array([1e-3], dtype=np.float16).view(np.uint8)
    return raw.reshape(stored.shape[0], -1)


def write_gguf(
    path: Path, source: Path, *, pre: str = "smollm", architecture: str = "llama", types: Mapping[str, str] = QUANTISED,
    without: str = "", rope_factors: Sequence[float] = (),
) -> dict[str, Any]:
    """The Model T in `source` as GGUF; `types` by the part of the name, `without` one tensor.

    Returns the values that the file holds, by their safetensors names."""
    writer = GGUFWriter(str(path), architecture)
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(json.loads((source / "config.json").read_text())["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    vocab = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [*sorted(vocab, key=vocab.get), *MARKERS, "ab"]
    tokens += [f"<pad{i}>" for i in range(320 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in MARKERS else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ bos_token }}")
    values = _write_tensors(writer, source, types, without)
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _write_tensors(
    writer: GGUFWriter, source: Path, types: Mapping[str, str], without: str
) -> dict[str, Any]:
    names = {f"{target}.weight": f"{ours}.weight" for ours, target in TOP_NAMES.items()}
    for layer in range(2):
        for ours, target in LAYER_NAMES.items():
            names[f"model.layers.{layer}.{target}.weight"] = f"blk.{layer}.{ours}.weight"
    values = {}
    with safe_open(str(source / "model.safetensors"), framework="np") as file:
        for name in sorted(name for name in file.keys() if name != without):
            part = names[name].split(".")[-2]
            kind = GGMLQuantizationType[types.get(part, "F32")]
            stored = file.get_tensor(name)
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(part)
            if heads:
                stored = pair(stored, heads)
            data = _encoded(stored, kind)
            writer.add_tensor(names[name], data, raw_dtype=kind)
            values[name] = dequantize(data, kind).reshape(stored.shape)
            if heads:
                rows, columns = stored.shape
                values[name] = values[name].reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2)
                values[name] = values[name].reshape(rows, columns)
    return values
