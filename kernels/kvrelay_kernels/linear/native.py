"""The C++ linear layer: weights in panels (`panels.h`), any number of rows, rows whose bits depend on nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay_kernels.native.library import ELEMENT_TYPES, Library, MatrixStruct, address, byref, rows, threads

GROUP = 32
DEPTHS = {torch.float32: 16, torch.bfloat16: 32}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    panels: Tensor
    """Opaque."""
    num_outputs: int
    num_inputs: int

    def struct(self, bias: Tensor | None = None) -> MatrixStruct:
        """`bias` [num_outputs] float32, kept alive by the caller."""
        kind = ELEMENT_TYPES[self.panels.dtype]
        return MatrixStruct(self.panels.data_ptr(), address(bias), self.num_outputs, self.num_inputs, kind)


def pack(library: Library, weight: Tensor) -> PackedWeight:
    """W [out, in] float32 or bfloat16."""
    num_outputs, num_inputs = weight.shape
    depth = DEPTHS[weight.dtype]
    size = -(-num_outputs // GROUP) * GROUP * (-(-num_inputs // depth) * depth)
    panels = torch.empty(size, dtype=weight.dtype)
    library.prefer_huge_pages(panels.data_ptr(), panels.nbytes)
    weight = weight.contiguous()
    library.pack(weight.data_ptr(), num_outputs, num_inputs, ELEMENT_TYPES[weight.dtype], panels.data_ptr())
    return PackedWeight(panels, num_outputs, num_inputs)


def linear(library: Library, x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    x = x.contiguous()
    y = torch.empty((x.shape[0], packed.num_outputs), dtype=x.dtype)
    wide_bias = None if bias is None else bias.float()
    library.linear(byref(packed.struct(wide_bias)), rows(x), x.shape[0], rows(y), threads())
    return y
