"""What the machine can do at best: the yardsticks that a step is compared with.

    read bandwidth   the fastest of four ways to read 1 GiB on huge pages, which no cache holds: a sum of integers, a
                     dot product, torch's matrix-vector product and the one of the kernels that serve models here
    reading again    the same over fewer bytes, time after time: what a cache holds of them comes faster
    GEMM rate        the best of several bf16 products of square matrices
"""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

READ_BYTES = 1 << 30
GEMM_SIZES = (1024, 2048)
ROUNDS = 5
HUGE_PAGE = 2 << 20
COLUMNS = 1 << 10


@dataclass(frozen=True, slots=True)
class Machine:
    read_gbps: float
    """10^9 bytes per second, all threads together."""
    gemm_gflops: float


def measure_machine(
    *, threads: int = 0, read_bytes: int = READ_BYTES, gemm_sizes: tuple[int, ...] = GEMM_SIZES
) -> Machine:
    """With torch's threads, or `threads` of them."""
    import torch

    if threads > 0:
        torch.set_num_threads(threads)
    return Machine(read_gbps(read_bytes), max(_gemm_gflops(size) for size in gemm_sizes))


def best_of(first: Machine, second: Machine) -> Machine:
    """A yardstick that was disturbed is too short: the better of two tries counts."""
    return Machine(max(first.read_gbps, second.read_gbps), max(first.gemm_gflops, second.gemm_gflops))


def read_gbps(num_bytes: int) -> float:
    """The fastest of several ways and tries. Below the size of a cache it is the cache that is measured."""

    size = max(1, num_bytes // (4 * COLUMNS)) * 4 * COLUMNS
    return size / min(_best_torch_s(size), _best_s(_one_row(size))) / 1e9


def _best_torch_s(num_bytes: int) -> float:
    import torch

    data, vector = _on_huge_pages(num_bytes), torch.ones(COLUMNS)
    ways: tuple[Callable[[], object], ...] = (
        lambda: data.view(torch.int64).sum(),
        lambda: torch.dot(data, data),
        lambda: data.view(-1, COLUMNS) @ vector,
    )
    return min(map(_best_s, ways))


def _on_huge_pages(num_bytes: int) -> Tensor:
    """float32 ones: with pages of 4 KiB, looking up addresses costs more than a tenth of the bandwidth."""
    import torch

    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE)
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -raw.data_ptr() % HUGE_PAGE
    return raw[begin : begin + num_bytes].view(torch.float32).fill_(1.0)


def _one_row(num_bytes: int) -> Callable[[], object]:
    """One token through a linear layer with that many bytes of bf16 weights, as a decode step reads its weights."""
    import torch

    from kvrelay_kernels.dispatch import ops_for

    ops = ops_for(torch.device("cpu"), torch.bfloat16)
    packed = ops.pack(torch.ones(num_bytes // (2 * COLUMNS), COLUMNS, dtype=torch.bfloat16))
    row = torch.ones(1, COLUMNS, dtype=torch.bfloat16)
    return lambda: ops.linear(row, packed, None)


def _gemm_gflops(size: int) -> float:
    import torch

    left = torch.ones(size, size, dtype=torch.bfloat16)
    right = torch.ones(size, size, dtype=torch.bfloat16)
    return float(2 * size**3 / _best_s(lambda: left @ right) / 1e9)


def _best_s(work: Callable[[], object]) -> float:
    work()
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
