"""Weights in every quantised format, made of noise."""

from __future__ import annotations

import torch

from kvrelay_kernels.linear.quantised import GROUP, QuantisedWeight

FORMATS = ["q4_0", "q4_1", "q8_0", "int8"]


def quantised(form: str, num_outputs: int, num_inputs: int, *, wide: bool = False, seed: int = 0) -> QuantisedWeight:
    """Numbers of about one size. `wide`: scales that float16 does not hold."""
    generator = torch.Generator().manual_seed(seed)
    group = num_inputs if form == "int8" else GROUP
    bits = 4 if form.startswith("q4") else 8
    low, high = (0, 16) if bits == 4 else (-127 if form == "int8" else -128, 128)
    codes = torch.randint(low, high, (num_outputs, num_inputs), generator=generator, dtype=torch.int8)
    scales = torch.rand(num_outputs, num_inputs // group, generator=generator) / (high - low) + 0.001
    scales = scales if wide else scales.half().float()
    offsets = {"q4_0": -8 * scales, "q4_1": (-high * scales / 2 * 0.9).half().float()}.get(form)
    return QuantisedWeight(codes, scales, offsets, bits, group)
