"""Weights straight from a GGUF file: Q4_0, Q4_1 and Q8_0 as the codes they are, everything else as floats.

    block of 32    Q4_0   d │ 16 bytes          w = d·(code − 8)      a byte holds codes i (low) and i + 16 (high)
                   Q4_1   d │ m │ 16 bytes      w = d·code + m
                   Q8_0   d │ 32 bytes          w = d·code            d and m are float16

K-quants have scales of scales: they are written out as floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from torch import Tensor

from kvrelay.core.errors import ConfigError
from kvrelay.model.gguf_file import StoredTensor
from kvrelay_kernels.linear.quantised import GROUP, QuantisedWeight

CODED = frozenset({"Q4_0", "Q4_1", "Q8_0"})
FLOATS = frozenset({"F32", "F16", "BF16"})

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class GgufCheckpoint:
    """Implements `checkpoint.Checkpoint`. The file is mapped, not read; a tensor is copied when asked for."""

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor]) -> None:
        """`tensors` as `GgufFile` found them. Raises ConfigError if the file is shorter than they say."""
        self._path = path
        self._tensors = tensors
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        end = max(tensor.offset + tensor.num_bytes for tensor in tensors.values())
        if len(self._bytes) < end:
            raise ConfigError(f"{path} ends after {len(self._bytes)} bytes; its tensors need {end}")

    def __enter__(self) -> GgufCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._bytes  # what holds the mapping

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    @property
    def types(self) -> list[str]:
        kinds = [tensor.type for tensor in self._tensors.values() if tensor.type not in FLOATS]
        return sorted(set(kinds), key=lambda name: (-kinds.count(name), name))

    def is_coded(self, name: str) -> bool:
        return name in self._tensors and self._tensors[name].type in CODED

    def read(self, name: str) -> Tensor | QuantisedWeight:
        if not self.is_coded(name):
            return self.read_floats(name)
        tensor = self._tensor(name)
        rows, columns = tensor.shape
        weight = unpack(self._raw(tensor).reshape(rows, -1), columns, tensor.type)
        return weight.rows(_order(tensor)) if tensor.num_heads else weight

    def read_floats(self, name: str) -> Tensor:
        """Exactly what the file says, as float32."""
        tensor = self._tensor(name)
        raw = self._raw(tensor).reshape(*tensor.shape[:-1], -1)
        try:
            values = np.array(dequantize(raw, Type[tensor.type]), dtype=np.float32)  # F32 would be a view
        except NotImplementedError:
            raise ConfigError(
                f"{self._path}: {name} is in {tensor.type}, which cannot be read; "
                "take a file in Q8_0, Q4_1, Q4_0 or a K-quant"
            ) from None
        floats = torch.from_numpy(values)
        return floats[_order(tensor)] if tensor.num_heads else floats

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise ConfigError(f"{self._path}: the GGUF has no {name}")
        return self._tensors[name]

    def _raw(self, tensor: StoredTensor) -> Bytes:
        return self._bytes[tensor.offset : tensor.offset + tensor.num_bytes]


def _order(tensor: StoredTensor) -> Tensor:
    """Where each of our rows lies in the file."""
    rows, heads = tensor.shape[0], tensor.num_heads
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(rows)


def unpack(blocks: Bytes, columns: int, kind: str) -> QuantisedWeight:
    """blocks [rows, bytes of a row] as they lie in the file → the same numbers as codes."""
    rows = blocks.shape[0]
    blocks = blocks.reshape(rows, columns // GROUP, -1)
    scales = _halves(blocks, 0)
    if kind == "Q8_0":
        codes = blocks[:, :, 2:].view(np.int8)
        return QuantisedWeight(_codes(codes, rows, columns), scales, None, 8, GROUP)
    offsets = _halves(blocks, 2) if kind == "Q4_1" else -8.0 * scales
    packed = blocks[:, :, -GROUP // 2 :]
    codes = np.concatenate([packed & 15, packed >> 4], axis=2).view(np.int8)
    return QuantisedWeight(_codes(codes, rows, columns), scales, offsets, 4, GROUP)


def _halves(blocks: Bytes, at: int) -> Tensor:
    """The float16 at byte `at` of every block, [rows, blocks] float32."""
    raw = np.ascontiguousarray(blocks[:, :, at : at + 2])
    return torch.from_numpy(raw.view(np.float16)[:, :, 0].astype(np.float32))


def _codes(codes: np.ndarray[Any, np.dtype[np.int8]], rows: int, columns: int) -> Tensor:
    return torch.from_numpy(np.array(codes).reshape(rows, columns))
