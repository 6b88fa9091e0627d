"""The compiled library as Python sees it: structs mirrored from abi.h, tensors as pointers, one object per set.

Calls release the interpreter's lock. Every pointer is borrowed for the call; who made the tensor keeps it alive.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_bool, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvrelay_kernels.native.build import BuildError, built, usable_sets

ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1}
MAX_HEAD_DIM = 1024

_log = logging.getLogger("kvrelay.kernels")


class MatrixStruct(Structure):
    _fields_ = [
        ("data", c_void_p), ("bias", c_void_p), ("n", c_int64), ("k", c_int64), ("type", c_int32),
        ("code_bits", c_int32), ("per_row", c_int32), ("has_offsets", c_int32), ("wide_scales", c_int32),
    ]


class TableStruct(Structure):
    _fields_ = [
        ("data", c_void_p), ("scales", c_void_p), ("offsets", c_void_p), ("size", c_int64), ("group", c_int64),
        ("type", c_int32),
    ]


class CacheStruct(Structure):
    _fields_ = [
        ("data", c_void_p), ("block_stride", c_int64),
        ("kv_heads", c_int64), ("block_size", c_int64), ("head_dim", c_int64), ("type", c_int32),
    ]


class BatchStruct(Structure):
    _fields_ = [
        ("query_lens", c_void_p), ("kv_lens", c_void_p), ("tables", c_void_p),
        ("num_sequences", c_int64), ("table_width", c_int64),
    ]


class RowsStruct(Structure):
    _fields_ = [("data", c_void_p), ("row_stride", c_int64), ("type", c_int32)]


class LayerStruct(Structure):
    _fields_ = [
        ("input_norm", c_void_p), ("post_norm", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p),
        ("qkv", MatrixStruct), ("output", MatrixStruct), ("gate_up", MatrixStruct), ("down", MatrixStruct),
        ("cache", c_void_p), ("window", c_int64),
    ]


class DecoderStruct(Structure):
    _fields_ = [
        ("num_layers", c_int64), ("hidden", c_int64), ("ffn", c_int64), ("heads", c_int64), ("kv_heads", c_int64),
        ("head_dim", c_int64), ("block_size", c_int64), ("block_stride", c_int64), ("vocab", c_int64),
        ("eps", c_float), ("scale", c_float), ("kv_type", c_int32),
        ("layers", POINTER(LayerStruct)), ("embedding", TableStruct), ("final_norm", c_void_p),
        ("cos", c_void_p), ("sin", c_void_p), ("head", MatrixStruct),
    ]


class StepStruct(Structure):
    _fields_ = [
        ("token_ids", c_void_p), ("last_rows", c_void_p), ("logits", c_void_p),
        ("num_tokens", c_int64), ("num_last", c_int64), ("batch", BatchStruct),
    ]


_SIGNATURES: dict[str, list[Any]] = {
    "prefer_huge_pages": [c_void_p, c_int64],
    "pack": [c_void_p, c_int64, c_int64, c_int32, c_void_p],
    "pack_codes": [POINTER(MatrixStruct), c_void_p, c_void_p, c_void_p, c_void_p],
    "linear": [POINTER(MatrixStruct), RowsStruct, c_int64, RowsStruct, c_int],
    "rms_norm": [RowsStruct, c_void_p, c_int64, c_int64, c_float, RowsStruct, c_int],
    "add_rms_norm": [RowsStruct, RowsStruct, c_void_p, c_int64, c_int64, c_float, RowsStruct, c_int],
    "silu_and_mul": [RowsStruct, c_int64, c_int64, RowsStruct, c_int],
    "rotary": [RowsStruct, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int],
    "write_kv": [RowsStruct, c_void_p, c_int64, POINTER(CacheStruct), c_int],
    "attention": [
        RowsStruct, POINTER(CacheStruct), POINTER(BatchStruct), c_int64, c_float, c_int64, RowsStruct, c_int,
    ],
    "greedy": [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int],
    "decoder_step": [POINTER(DecoderStruct), POINTER(StepStruct), c_int],
}


class Library:
    """`call.<function>(…)` without the prefix `kvr_`."""

    def __init__(self, path: str, instruction_set: str) -> None:
        self.instruction_set = instruction_set
        self._loaded = ctypes.CDLL(path)
        start = self._loaded.kvr_start
        start.restype = c_bool
        self.runs_here: bool = start()
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._loaded, f"kvr_{name}")
            function.argtypes, function.restype = arguments, None

    def __getattr__(self, name: str) -> Callable[..., None]:
        function: Callable[..., None] = getattr(self._loaded, f"kvr_{name}")
        return function


@cache
def load_set(name: str) -> Library | None:
    """The library for an instruction set by name; None if this machine does not have it. Raises BuildError."""
    chosen = next((candidate for candidate in usable_sets() if candidate.name == name), None)
    if chosen is None:
        return None
    library = Library(str(built(chosen)), name)
    return library if library.runs_here else None


@cache
def best_library() -> Library | None:
    """For this machine; None, with one warning, if nothing can be compiled."""
    try:
        return next(filter(None, (load_set(candidate.name) for candidate in usable_sets())), None)
    except (BuildError, OSError) as error:
        _log.warning("the native CPU kernels are not available, torch computes instead, 2 to 4 times slower: %s", error)
        return None


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def rows(tensor: Tensor) -> RowsStruct:
    """[rows, …] whose trailing dimensions are contiguous."""
    return RowsStruct(tensor.data_ptr(), tensor.stride(0), ELEMENT_TYPES[tensor.dtype])


def cache_struct(cache: Tensor) -> CacheStruct:
    """[blocks, 2, kv_heads, block_size, head_dim]; blocks may lie apart, what is inside one may not."""
    _, _, kv_heads, block_size, head_dim = cache.shape
    return CacheStruct(
        cache.data_ptr(), cache.stride(0), kv_heads, block_size, head_dim, ELEMENT_TYPES[cache.dtype]
    )


def threads() -> int:
    """Compute threads of this process: what torch was told."""
    return int(torch.get_num_threads())


__all__ = [
    "ELEMENT_TYPES", "BatchStruct", "CacheStruct", "DecoderStruct", "LayerStruct", "Library", "MatrixStruct",
    "RowsStruct", "StepStruct", "TableStruct", "address", "best_library", "byref", "cache_struct", "load_set", "rows",
    "threads",
]
