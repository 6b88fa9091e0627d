"""The C++ RMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrelay_kernels.native.library import Library, rows, threads


def rms_norm(library: Library, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    size = x.shape[-1]
    flat, y = x.reshape(-1, size), torch.empty(x.shape, dtype=x.dtype)
    wide = weight.float()
    library.rms_norm(rows(flat), wide.data_ptr(), flat.shape[0], size, eps, rows(y.view(-1, size)), threads())
    return y


def add_rms_norm(
    library: Library, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`residual` [rows, size] is updated in place and returned as the sum."""
    y, wide = torch.empty(x.shape, dtype=x.dtype), weight.float()
    library.add_rms_norm(
        rows(x), rows(residual), wide.data_ptr(), x.shape[0], x.shape[-1], eps, rows(y), threads()
    )
    return y, residual
