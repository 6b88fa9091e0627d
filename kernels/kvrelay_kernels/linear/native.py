"""The C++ linear layer: weights in panels (`panels.h`) or cells of codes (`codes.h`), any number of rows.

A row's bits depend on nothing but the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay_kernels.linear.quantised import GROUP as CELL_DEPTH
from kvrelay_kernels.linear.quantised import QuantisedWeight
from kvrelay_kernels.native.library import ELEMENT_TYPES, Library, MatrixStruct, address, byref, rows, threads

GROUP = 32
DEPTHS = {torch.float32: 16, torch.bfloat16: 32}
LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class CodeFormat:
    bits: int
    per_row: bool
    """One scale per row, not per 32 inputs."""
    has_offsets: bool
    wide_scales: bool
    """float32, because float16 would not hold them exactly."""

    def packed_bytes(self, num_outputs: int, num_inputs: int) -> int:
        groups, cells = -(-num_outputs // GROUP), -(-num_inputs // CELL_DEPTH)
        scales = GROUP * (4 if self.wide_scales else 2) * (2 if self.has_offsets else 1)
        codes = cells * GROUP * CELL_DEPTH * self.bits // 8
        return groups * (codes + (1 if self.per_row else cells) * scales)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    panels: Tensor
    """Opaque."""
    num_outputs: int
    num_inputs: int
    codes: CodeFormat | None = None

    def struct(self, bias: Tensor | None = None) -> MatrixStruct:
        """`bias` [num_outputs] float32, kept alive by the caller."""
        data, shape = self.panels.data_ptr(), (self.num_outputs, self.num_inputs)
        if self.codes is None:
            return MatrixStruct(data, address(bias), *shape, ELEMENT_TYPES[self.panels.dtype])
        form = self.codes
        kind = ELEMENT_TYPES[torch.bfloat16]
        return MatrixStruct(
            data, address(bias), *shape, kind, form.bits, form.per_row, form.has_offsets, form.wide_scales
        )


def pack(library: Library, weight: Tensor | QuantisedWeight) -> PackedWeight:
    """W [out, in] float32, bfloat16 or codes."""
    if isinstance(weight, QuantisedWeight):
        return _pack_codes(library, weight)
    num_outputs, num_inputs = weight.shape
    depth = DEPTHS[weight.dtype]
    size = -(-num_outputs // GROUP) * GROUP * (-(-num_inputs // depth) * depth)
    panels = torch.empty(size, dtype=weight.dtype)
    library.prefer_huge_pages(panels.data_ptr(), panels.nbytes)
    weight = weight.contiguous()
    library.pack(weight.data_ptr(), num_outputs, num_inputs, ELEMENT_TYPES[weight.dtype], panels.data_ptr())
    return PackedWeight(panels, num_outputs, num_inputs)


def _pack_codes(library: Library, weight: QuantisedWeight) -> PackedWeight:
    per_row = weight.group == weight.shape[1] and weight.group != CELL_DEPTH
    if not per_row and weight.group != CELL_DEPTH:
        raise ValueError(f"groups of {weight.group} inputs; only groups of {CELL_DEPTH} or whole rows are packed")
    parts = [weight.scales] if weight.offsets is None else [weight.scales, weight.offsets]
    wide = not all(torch.equal(part.half().float(), part) for part in parts)
    parts = [part.to(torch.float32 if wide else torch.float16).contiguous() for part in parts]
    codes = weight.codes.contiguous()
    form = CodeFormat(weight.bits, per_row, len(parts) == 2, wide)
    panels = _on_a_line(library, form.packed_bytes(*weight.shape))
    packed = PackedWeight(panels, *weight.shape, form)
    library.pack_codes(
        byref(packed.struct()), codes.data_ptr(), parts[0].data_ptr(), address(parts[1]) if parts[1:] else None,
        panels.data_ptr(),
    )
    return packed


def _on_a_line(library: Library, size: int) -> Tensor:
    """`size` zeroed bytes that begin on a cache line."""
    memory = torch.empty(size + LINE_BYTES, dtype=torch.uint8)
    library.prefer_huge_pages(memory.data_ptr(), memory.nbytes)
    begin = -memory.data_ptr() % LINE_BYTES
    return memory[begin : begin + size].zero_()


def linear(library: Library, x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    x = x.contiguous()
    y = torch.empty((x.shape[0], packed.num_outputs), dtype=x.dtype)
    wide_bias = None if bias is None else bias.float()
    library.linear(byref(packed.struct(wide_bias)), rows(x), x.shape[0], rows(y), threads())
    return y
