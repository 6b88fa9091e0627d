"""The C++ write of new keys and values, through the slots."""

from __future__ import annotations

from torch import Tensor

from kvrelay_kernels.native.library import Library, byref, cache_struct, rows, threads


def plan_write(slots: Tensor, cache: Tensor) -> Tensor:
    return slots.contiguous()


def write_kv(library: Library, kv: Tensor, cache: Tensor, plan: Tensor) -> None:
    """The heads of a token lie side by side; tokens may lie apart."""
    library.write_kv(rows(kv), plan.data_ptr(), kv.shape[0], byref(cache_struct(cache)), threads())
