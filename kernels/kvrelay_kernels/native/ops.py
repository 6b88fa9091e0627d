"""The C++ operators as a set for `dispatch`, bound to one instruction set's library."""

from __future__ import annotations

from functools import partial

from kvrelay_kernels.decoder.native import NativeDecoder
from kvrelay_kernels.dispatch import CPU, Ops
from kvrelay_kernels.linear import native as linear
from kvrelay_kernels.native.build import sources_digest
from kvrelay_kernels.native.library import Library
from kvrelay_kernels.paged_attention import native as attention
from kvrelay_kernels.rms_norm import native as norm
from kvrelay_kernels.rotary import native as rotary
from kvrelay_kernels.sample import native as sample
from kvrelay_kernels.silu_and_mul import native as silu
from kvrelay_kernels.write_kv import native as write


def native_ops(library: Library) -> Ops:
    """float32 and bfloat16, head_dim a multiple of 8 up to 1024."""
    return Ops(
        name=f"native/{library.instruction_set}",
        pack=partial(linear.pack, library),
        linear=partial(linear.linear, library),
        rms_norm=partial(norm.rms_norm, library),
        add_rms_norm=partial(norm.add_rms_norm, library),
        silu_and_mul=partial(silu.silu_and_mul, library),
        rotary_=partial(rotary.rotary_, library),
        plan_write=write.plan_write,
        write_kv=partial(write.write_kv, library),
        plan_attention=attention.plan_attention,
        paged_attention=partial(attention.paged_attention, library),
        copy_blocks=CPU.copy_blocks,
        gather_blocks=CPU.gather_blocks,
        scatter_blocks=CPU.scatter_blocks,
        greedy=partial(sample.greedy, library),
        draw=CPU.draw,
        decoder=partial(NativeDecoder, library),
        exact=sources_digest(),
    )
