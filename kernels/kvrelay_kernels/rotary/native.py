"""The C++ rotary embedding, in place."""

from __future__ import annotations

from torch import Tensor

from kvrelay_kernels.native.library import Library, rows, threads


def rotary_(library: Library, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """The heads of a token lie side by side; tokens may lie apart."""
    num_tokens, heads, head_dim = x.shape
    cos, sin = cos.contiguous(), sin.contiguous()
    library.rotary(rows(x), cos.data_ptr(), sin.data_ptr(), num_tokens, heads, head_dim, threads())
