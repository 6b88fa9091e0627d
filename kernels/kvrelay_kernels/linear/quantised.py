"""A weight in whole numbers: what GGUF files hold and what `weights: int8 | int4` makes of float weights.

    w[row, i] = scale[row, i / group] · code[row, i] + offset[row, i / group]

    Q8_0   code −128…127, groups of 32, no offset        Q4_1   code 0…15, groups of 32, an offset (its minimum)
    Q4_0   code 0…15 with offset −8·scale                int8   code −127…127, one group per row (`group` = inputs)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Inputs per scale in every grouped format."""


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    codes: Tensor
    """[out, in] int8, one code per byte whatever its width; kernels pack it."""
    scales: Tensor
    """[out, in / group] float32."""
    offsets: Tensor | None
    """[out, in / group] float32."""
    bits: int
    """8, or 4: every code is in 0…15."""
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        rows, columns = self.codes.shape
        return rows, columns

    def rows(self, index: Tensor) -> QuantisedWeight:
        """The same weight with its rows in another order, or only some of them."""
        offsets = None if self.offsets is None else self.offsets[index]
        return QuantisedWeight(self.codes[index], self.scales[index], offsets, self.bits, self.group)

    def dequantise(self) -> Tensor:
        """[out, in] float32, exactly what the codes say."""
        rows, columns = self.shape
        grouped = self.codes.float().view(rows, -1, self.group) * self.scales.unsqueeze(-1)
        if self.offsets is not None:
            grouped = grouped + self.offsets.unsqueeze(-1)
        return grouped.view(rows, columns)


def stack(parts: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """One below the other, in the narrowest format that holds all exactly. All have the same inputs and group."""
    first = parts[0]
    has_offsets = any(part.offsets is not None for part in parts)
    return QuantisedWeight(
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        offsets=torch.cat([_offsets(part) for part in parts]) if has_offsets else None,
        bits=max(part.bits for part in parts),
        group=first.group,
    )


def _offsets(part: QuantisedWeight) -> Tensor:
    return torch.zeros_like(part.scales) if part.offsets is None else part.offsets


def quantise_rows(weight: Tensor) -> QuantisedWeight:
    """8 bits, one scale per row: off by at most half a step of absmax / 127."""
    wide = weight.float()
    scales = wide.abs().amax(dim=1, keepdim=True) / 127
    codes = (wide / _divisor(scales)).round().to(torch.int8)
    return QuantisedWeight(codes, scales, None, 8, weight.shape[1])


def quantise_groups(weight: Tensor) -> QuantisedWeight:
    """4 bits, a scale and an offset per group: off by at most half a step of (max − min) / 15. in % GROUP = 0."""
    rows, columns = weight.shape
    grouped = weight.float().view(rows, columns // GROUP, GROUP)
    offsets = grouped.amin(dim=2)
    scales = (grouped.amax(dim=2) - offsets) / 15
    codes = ((grouped - offsets.unsqueeze(2)) / _divisor(scales).unsqueeze(2)).round().to(torch.int8)
    return QuantisedWeight(codes.view(rows, columns), scales, offsets, 4, GROUP)


def _divisor(scales: Tensor) -> Tensor:
    """Where all are equal the scale is 0, and every code too."""
    return torch.where(scales > 0, scales, torch.ones_like(scales))
