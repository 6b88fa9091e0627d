"""RMSNorm (arXiv:1910.07467): y = x / sqrt(mean(x²) + eps) · w."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size], weight [size] → the shape of x."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual). The sum is rounded to x's dtype before it is normalised."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, eps), total
