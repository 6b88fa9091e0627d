"""The C++ gate: one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrelay_kernels.native.library import Library, rows, threads


def silu_and_mul(library: Library, gate_up: Tensor) -> Tensor:
    num_rows, ffn = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((num_rows, ffn), dtype=gate_up.dtype)
    library.silu_and_mul(rows(gate_up), num_rows, ffn, rows(y), threads())
    return y
