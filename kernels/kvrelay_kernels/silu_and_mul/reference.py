"""SwiGLU's gate (arXiv:2002.05202): y = silu(gate) · up, with gate and up side by side."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[tokens, 2·ffn] → [tokens, ffn]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)
