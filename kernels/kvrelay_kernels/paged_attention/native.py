"""The C++ attention: in place over the block tables, decoding and prefill alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay_kernels.native.library import BatchStruct, Library, byref, cache_struct, rows, threads
from kvrelay_kernels.paged_attention.batch import AttentionBatch


@dataclass(frozen=True, slots=True)
class NativePlan:
    query_lens: Tensor
    kv_lens: Tensor
    tables: Tensor
    scale: float
    window: int

    def struct(self) -> BatchStruct:
        num_sequences, width = self.tables.shape
        return BatchStruct(
            self.query_lens.data_ptr(), self.kv_lens.data_ptr(), self.tables.data_ptr(), num_sequences, width
        )


def plan_attention(batch: AttentionBatch, cache: Tensor, num_heads: int) -> NativePlan:
    return NativePlan(
        query_lens=_int32(batch.query_lens),
        kv_lens=_int32(batch.kv_lens),
        tables=batch.block_tables.to(torch.int32).contiguous(),
        scale=batch.scale,
        window=batch.window,
    )


def paged_attention(library: Library, q: Tensor, cache: Tensor, plan: NativePlan) -> Tensor:
    """The heads of a query lie side by side; queries may lie apart."""
    out = torch.empty(q.shape, dtype=q.dtype)
    library.attention(
        rows(q), byref(cache_struct(cache)), byref(plan.struct()), q.shape[1], plan.scale, plan.window, rows(out),
        threads(),
    )
    return out


def _int32(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)
