"""Where a model runs and in which numbers: decided once at load, from settings and the machine."""

from __future__ import annotations

import torch

from kvrelay.core.config import GIB, EngineSettings, parse_bytes
from kvrelay.core.errors import ConfigError
from kvrelay.core.kv import KvLayout
from kvrelay.model.storage import DTYPES
from kvrelay_kernels.dispatch import Ops

CPU_KV_BYTES = GIB
GPU_KV_FRACTION = 0.9


def choose_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_dtype(name: str, device: torch.device) -> str:
    """`auto` is bfloat16 where it is multiplied natively, else float32. Raises ConfigError."""
    if name == "auto":
        return "bfloat16" if _has_native_bfloat16(device) else "float32"
    if name not in DTYPES:
        raise ConfigError(f"`model.dtype` {name!r} is not known; known: auto, {', '.join(DTYPES)}")
    return name


def choose_numerics(setting: str, ops: Ops, dtype: str) -> str:
    """What `WorkerRecord.numerics` says: empty for fast. Raises ConfigError if exact is asked for and cannot be had."""
    if setting not in ("auto", "exact", "fast"):
        raise ConfigError(f"`model.numerics` {setting!r} is not known; known: auto, exact, fast")
    if setting == "exact" and not ops.exact:
        raise ConfigError(
            f"`model.numerics: exact` needs the native CPU kernels; {ops.name} kernels serve this model in {dtype}. "
            "Install a C++ compiler (a line above says what is missing), or set `numerics: fast`"
        )
    return f"{ops.name}@{ops.exact}/{dtype}" if setting != "fast" and ops.exact else ""


def _has_native_bfloat16(device: torch.device) -> bool:
    if device.type != "cpu":
        return bool(torch.cuda.is_bf16_supported())
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def choose_num_blocks(settings: EngineSettings, layout: KvLayout, device: torch.device) -> int:
    """Raises ConfigError if the pool would hold fewer than two blocks."""
    if settings.num_blocks:
        return layout.num_blocks(settings.num_blocks * layout.block_bytes)
    if settings.kv_memory != "auto":
        return layout.num_blocks(parse_bytes(settings.kv_memory))
    if device.type == "cpu":
        return layout.num_blocks(CPU_KV_BYTES)
    free, _ = torch.cuda.mem_get_info(device)
    return layout.num_blocks(int(free * GPU_KV_FRACTION))
