"""The C++ argmax."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrelay_kernels.native.library import Library, threads


def greedy(library: Library, logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [rows, vocab] float32; rows may lie apart."""
    num_rows, num_ids = logits.shape
    values, ids = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
    library.greedy(
        logits.data_ptr(), num_rows, logits.stride(0), num_ids, values.data_ptr(), ids.data_ptr(), threads()
    )
    return values, ids
