"""A whole step of the decoder in one call (`step.h`): a description of the model made once, a few integers per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvrelay_kernels.linear.native import PackedWeight
from kvrelay_kernels.linear.quantised import QuantisedWeight
from kvrelay_kernels.native.library import (
    ELEMENT_TYPES,
    BatchStruct,
    DecoderStruct,
    LayerStruct,
    Library,
    MatrixStruct,
    StepStruct,
    TableStruct,
    address,
    byref,
    threads,
)

Int32Array = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class LinearParts:
    weight: PackedWeight
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerParts:
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: LinearParts
    output: LinearParts
    gate_up: LinearParts
    down: LinearParts
    cache: Tensor
    """[blocks, 2, kv_heads, block_size, head_dim]."""
    window: int


@dataclass(frozen=True, slots=True)
class DecoderParts:
    layers: Sequence[LayerParts]
    embedding: Tensor | QuantisedWeight
    """[vocab, hidden]; codes are looked up as they are."""
    final_norm: Tensor
    head: LinearParts
    cos: Tensor
    """[positions, head_dim] float32, like `sin`: as `rotary` reads them."""
    sin: Tensor
    num_heads: int
    eps: float
    scale: float


class StepBatch:
    """Integers of one step; the sequences' query rows one after the other, the last tokens of each."""

    def __init__(
        self, token_ids: Int32Array, query_lens: Int32Array, kv_lens: Int32Array, tables: Int32Array,
        last_rows: Int32Array,
    ) -> None:
        """tables [sequences, blocks]; last_rows: the rows whose logits are wanted. All contiguous."""
        self._kept = (token_ids, query_lens, kv_lens, tables, last_rows)
        self.num_last = len(last_rows)
        self.num_tokens = len(token_ids)

    def struct(self, logits: Tensor) -> StepStruct:
        token_ids, query_lens, kv_lens, tables, last_rows = (array.ctypes.data for array in self._kept)
        num_sequences, width = self._kept[3].shape
        batch = BatchStruct(query_lens, kv_lens, tables, num_sequences, width)
        return StepStruct(token_ids, last_rows, logits.data_ptr(), self.num_tokens, self.num_last, batch)


class NativeDecoder:
    def __init__(self, library: Library, parts: DecoderParts) -> None:
        self._library = library
        self._kept: list[object] = [parts]  # what the structs point at
        self._vocab = parts.embedding.shape[0]
        self._struct = self._describe(parts)

    def step(self, batch: StepBatch) -> Tensor:
        """Writes the KV of all rows. Returns logits [last rows, vocab] float32."""
        logits = torch.empty((batch.num_last, self._vocab), dtype=torch.float32)
        self._library.decoder_step(byref(self._struct), byref(batch.struct(logits)), threads())
        return logits

    def _describe(self, parts: DecoderParts) -> DecoderStruct:
        cache = parts.layers[0].cache
        _, _, kv_heads, block_size, head_dim = cache.shape
        layers = (LayerStruct * len(parts.layers))(*(self._layer(layer) for layer in parts.layers))
        self._kept.append(layers)
        return DecoderStruct(
            num_layers=len(parts.layers), hidden=parts.embedding.shape[1],
            ffn=parts.layers[0].down.weight.num_inputs, heads=parts.num_heads, kv_heads=kv_heads,
            head_dim=head_dim, block_size=block_size, block_stride=cache.stride(0), vocab=self._vocab,
            eps=parts.eps, scale=parts.scale, kv_type=ELEMENT_TYPES[cache.dtype],
            layers=layers, embedding=self._table(parts.embedding), final_norm=self._wide(parts.final_norm),
            cos=self._wide(parts.cos), sin=self._wide(parts.sin), head=self._matrix(parts.head),
        )

    def _table(self, weight: Tensor | QuantisedWeight) -> TableStruct:
        if isinstance(weight, Tensor):
            kept = weight.contiguous()
            self._kept.append(kept)
            size = weight.shape[1]
            return TableStruct(kept.data_ptr(), None, None, size, size, ELEMENT_TYPES[weight.dtype])
        codes = weight.codes.contiguous()
        self._kept.append(codes)
        scales, offsets = self._wide(weight.scales), self._wide(weight.offsets)
        return TableStruct(codes.data_ptr(), scales, offsets, weight.shape[1], weight.group)

    def _layer(self, layer: LayerParts) -> LayerStruct:
        return LayerStruct(
            input_norm=self._wide(layer.input_norm), post_norm=self._wide(layer.post_norm),
            q_norm=self._wide(layer.q_norm), k_norm=self._wide(layer.k_norm),
            qkv=self._matrix(layer.qkv), output=self._matrix(layer.output),
            gate_up=self._matrix(layer.gate_up), down=self._matrix(layer.down),
            cache=layer.cache.data_ptr(), window=layer.window,
        )

    def _matrix(self, linear: LinearParts) -> MatrixStruct:
        bias = None if linear.bias is None else linear.bias.float()
        self._kept.append(bias)
        return linear.weight.struct(bias)

    def _wide(self, vector: Tensor | None) -> int | None:
        """Address of the same numbers in float32."""
        if vector is None:
            return None
        wide = vector.float().contiguous()
        self._kept.append(wide)
        return address(wide)
