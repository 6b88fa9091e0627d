"""oneDNN with weights in its own blocked order.

Against `F.linear` at decode shapes: 0.65× the time in bfloat16. In float32 a row's bits do not depend on how many
rows are multiplied beside it from two rows on (one row takes another path), so fewer than four are padded to four.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvrelay_kernels.linear.quantised import QuantisedWeight

MIN_FLOAT32_ROWS = 4
_PACKED = torch._C._has_mkldnn


def pack(weight: Tensor | QuantisedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """W [out, in] → the same numbers in oneDNN's order. Opaque: only `linear` can read it. Codes become `dtype`."""
    if isinstance(weight, QuantisedWeight):
        weight = weight.dequantise().to(dtype)
    if not _PACKED:
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    num_rows = x.shape[0]
    if x.dtype == torch.float32 and num_rows < MIN_FLOAT32_ROWS:
        padded = x.new_zeros(MIN_FLOAT32_ROWS, x.shape[1])
        padded[:num_rows] = x
        return _multiply(padded, packed, bias)[:num_rows]
    return _multiply(x, packed, bias)


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    if not packed.is_mkldnn:
        return F.linear(x, packed, bias)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y
