"""What the machine can do at best: the yardsticks that a step is compared with.

    read bandwidth   the fastest of three reductions over 1 GiB (a sum of integers, a dot product, a matrix-vector
                     product), each read once from memory: no cache holds it
    GEMM rate        the best of several bf16 products of square matrices
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

READ_BYTES = 1 << 30
GEMM_SIZES = (1024, 2048)
ROUNDS = 5


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
    return Machine(_read_gbps(read_bytes), max(_gemm_gflops(size) for size in gemm_sizes))


def best_of(first: Machine, second: Machine) -> Machine:
    """A yardstick that was disturbed is too short: the better of two tries counts."""
    return Machine(max(first.read_gbps, second.read_gbps), max(first.gemm_gflops, second.gemm_gflops))


def _read_gbps(num_bytes: int) -> float:
    import torch

    column = 1 << 10
    data = torch.ones(num_bytes // 4 // column * column, dtype=torch.float32)
    ways: tuple[Callable[[], object], ...] = (
        lambda: data.view(torch.int64).sum(),
        lambda: torch.dot(data, data),
        lambda: data.view(-1, column) @ data[:column],
    )
    return max(data.nbytes / _best_s(way) for way in ways) / 1e9


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
