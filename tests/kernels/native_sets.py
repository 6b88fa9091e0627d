"""The instruction sets of this machine, for tests that run on each of them."""

from __future__ import annotations

import pytest
import torch

from kvrelay_kernels.dispatch import Ops
from kvrelay_kernels.native.build import BuildError, usable_sets
from kvrelay_kernels.native.library import load_set
from kvrelay_kernels.native.ops import native_ops

SETS = [candidate.name for candidate in usable_sets()]
DTYPES = [torch.float32, torch.bfloat16]


def native(name: str) -> Ops:
    try:
        library = load_set(name)
    except BuildError as error:
        pytest.skip(str(error))
    if library is None:
        pytest.skip(f"this machine does not run {name}")
    return native_ops(library)
