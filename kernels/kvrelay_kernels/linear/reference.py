"""y = x · Wᵀ + b, accumulated in float32."""

from __future__ import annotations

from torch import Tensor

from kvrelay_kernels.linear.quantised import QuantisedWeight


def pack(weight: Tensor | QuantisedWeight) -> Tensor:
    """The reference keeps W [out, in] as it is; codes become float32."""
    return weight.dequantise() if isinstance(weight, QuantisedWeight) else weight


def linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [tokens, in] → [tokens, out]."""
    y = x.float() @ packed.float().T
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)
