"""The same through numpy: called from transfer threads, where torch would start a second pool of compute threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_BITS = {2: torch.int16, 4: torch.int32}


def gather_blocks(pool: Tensor, blocks: Tensor, layer_begin: int, layer_end: int) -> Tensor:
    return torch.from_numpy(_bits(pool)[blocks.numpy(), layer_begin:layer_end]).view(pool.dtype)


def scatter_blocks(
    pool: Tensor, blocks: Tensor, layer_begin: int, layer_end: int, head_begin: int, head_end: int, slab: Tensor
) -> None:
    target = _bits(pool)[:, layer_begin:layer_end, :, head_begin:head_end]
    target[blocks.numpy()] = _bits(slab.to(pool.dtype))


def _bits(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The numbers' bits as integers, sharing memory: numpy has no bfloat16."""
    bits: np.ndarray[Any, Any] = tensor.view(_BITS[tensor.element_size()]).numpy()
    return bits
