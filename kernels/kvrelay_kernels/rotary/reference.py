"""Rotary position embedding (arXiv:2104.09864), half-split: dimension i turns with dimension i + head_dim/2.

    y = x · cos + swap(x) · sin      swap([a, b]) = [b, a],  cos = [c, c],  sin = [-s, s]
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turns x [tokens, heads, head_dim] in place. cos, sin [tokens, 1, head_dim] float32, both halves written out."""
    wide = x.float()
    swapped = torch.roll(wide, wide.shape[-1] // 2, dims=-1)
    x.copy_(wide * cos + swapped * sin)
