"""Picks a set of operators by device. Every set has the same signatures; the reference runs anywhere.

A caller asks once, keeps the `Ops`, and passes what `plan_write` and `plan_attention` return back to the same set only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from kvrelay_kernels.copy_blocks import reference as copy_reference
from kvrelay_kernels.decoder.native import DecoderParts, NativeDecoder
from kvrelay_kernels.gather_blocks import cpu as gather_cpu
from kvrelay_kernels.gather_blocks import reference as gather_reference
from kvrelay_kernels.linear import cpu as linear_cpu
from kvrelay_kernels.linear import reference as linear_reference
from kvrelay_kernels.linear.quantised import QuantisedWeight
from kvrelay_kernels.paged_attention import cpu as attention_cpu
from kvrelay_kernels.paged_attention import reference as attention_reference
from kvrelay_kernels.paged_attention.batch import AttentionBatch
from kvrelay_kernels.rms_norm import cpu as norm_cpu
from kvrelay_kernels.rms_norm import reference as norm_reference
from kvrelay_kernels.rotary import reference as rotary_reference
from kvrelay_kernels.sample import cpu as sample_cpu
from kvrelay_kernels.sample import reference as sample_reference
from kvrelay_kernels.silu_and_mul import cpu as silu_cpu
from kvrelay_kernels.silu_and_mul import reference as silu_reference
from kvrelay_kernels.write_kv import cpu as write_cpu
from kvrelay_kernels.write_kv import reference as write_reference

Plan = Any
"""Opaque: made and read by one set."""

Packed = Any
"""Likewise: a weight as one set multiplies with it."""


@dataclass(frozen=True, slots=True)
class Ops:
    """Shapes and meaning: the `reference.py` of each operator."""

    name: str
    pack: Callable[[Tensor | QuantisedWeight], Packed]
    linear: Callable[[Tensor, Packed, Tensor | None], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    rotary_: Callable[[Tensor, Tensor, Tensor], None]
    plan_write: Callable[[Tensor, Tensor], Plan]
    write_kv: Callable[[Tensor, Tensor, Plan], None]
    plan_attention: Callable[[AttentionBatch, Tensor, int], Plan]
    paged_attention: Callable[[Tensor, Tensor, Plan], Tensor]
    copy_blocks: Callable[[Tensor, Tensor, Tensor], None]
    gather_blocks: Callable[[Tensor, Tensor, int, int], Tensor]
    scatter_blocks: Callable[[Tensor, Tensor, int, int, int, int, Tensor], None]
    greedy: Callable[[Tensor], tuple[Tensor, Tensor]]
    draw: Callable[[Tensor, float, int, float, float, float], int]
    decoder: Callable[[DecoderParts], NativeDecoder] | None = None
    """All layers of a step in one call, where a set can do that."""
    exact: str = ""
    """If a row's bits depend on nothing but the row: a digest of the code they come from. Else empty."""


REFERENCE = Ops(
    name="reference",
    pack=linear_reference.pack,
    linear=linear_reference.linear,
    rms_norm=norm_reference.rms_norm,
    add_rms_norm=norm_reference.add_rms_norm,
    silu_and_mul=silu_reference.silu_and_mul,
    rotary_=rotary_reference.rotary_,
    plan_write=write_reference.plan_write,
    write_kv=write_reference.write_kv,
    plan_attention=attention_reference.plan_attention,
    paged_attention=attention_reference.paged_attention,
    copy_blocks=copy_reference.copy_blocks,
    gather_blocks=gather_reference.gather_blocks,
    scatter_blocks=gather_reference.scatter_blocks,
    greedy=sample_reference.greedy,
    draw=sample_reference.draw,
)

CPU = Ops(
    name="cpu",
    pack=linear_cpu.pack,
    linear=linear_cpu.linear,
    rms_norm=norm_cpu.rms_norm,
    add_rms_norm=norm_cpu.add_rms_norm,
    silu_and_mul=silu_cpu.silu_and_mul,
    rotary_=rotary_reference.rotary_,
    plan_write=write_cpu.plan_write,
    write_kv=write_cpu.write_kv,
    plan_attention=attention_cpu.plan_attention,
    paged_attention=attention_cpu.paged_attention,
    copy_blocks=copy_reference.copy_blocks,
    gather_blocks=gather_cpu.gather_blocks,
    scatter_blocks=gather_cpu.scatter_blocks,
    greedy=sample_cpu.greedy,
    draw=sample_cpu.draw,
)


def ops_for(device: torch.device, dtype: torch.dtype = torch.float32, head_dim: int = 8) -> Ops:
    """The fastest set that computes with these on this machine."""
    if device.type != "cpu":
        return REFERENCE
    if dtype not in (torch.float32, torch.bfloat16) or head_dim % 8 or head_dim > 1024:
        return cpu_ops(dtype)
    return best_native() or cpu_ops(dtype)


@cache
def cpu_ops(dtype: torch.dtype) -> Ops:
    """Torch has no kernel for codes: it multiplies with the numbers that they stand for, in `dtype`."""
    return CPU if dtype == torch.float32 else replace(CPU, pack=partial(linear_cpu.pack, dtype=dtype))


@cache
def best_native() -> Ops | None:
    """None where nothing can be compiled."""
    from kvrelay_kernels.native.library import best_library
    from kvrelay_kernels.native.ops import native_ops  # builds on the sets above

    library = best_library()
    return None if library is None else native_ops(library)
