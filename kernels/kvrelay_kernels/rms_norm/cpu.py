"""torch's own RMSNorm: float32 inside, one pass."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`residual` is updated in place and returned as the sum."""
    total = residual.add_(x)
    return F.rms_norm(total, (x.shape[-1],), weight, eps), total
