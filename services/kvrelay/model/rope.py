"""Rotary frequencies: default, linear, llama3 and yarn, from both spellings of the transformers config.

    angle(position, i) = position · frequency_i,   frequency_i = theta^(−2i / head_dim) for the default

The others stretch the frequencies for contexts longer than the model was trained on:
  linear   divides all by `factor` (arXiv:2306.15595)
  llama3   divides slow ones, keeps fast ones, blends between two wavelengths (Llama 3.1 model card)
  yarn     the same idea, blended by number of rotations, plus a factor on cos and sin (arXiv:2309.00071)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvrelay.core.errors import ConfigError

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_context: int = 0
    """What the model was trained on (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    """Factor on cos and sin (yarn)."""


def read_rope(config: Mapping[str, Any], max_context: int) -> RopeSpec:
    """`rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before). Raises ConfigError."""
    values: dict[str, Any] = {
        **(config.get("rope_scaling") or {}),
        **(config.get("rope_parameters") or {}),
    }
    theta = float(values.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in KINDS:
        raise ConfigError(f"rope type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    partial = values.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if float(partial) != 1.0:
        raise ConfigError(f"partial_rotary_factor {partial} is not supported: all dimensions turn")
    if kind == "default":
        return RopeSpec(theta=theta)
    original = int(
        config.get("original_max_position_embeddings") or values.get("original_max_position_embeddings") or max_context
    )
    factor = values.get("factor")
    if factor is None:
        if kind != "yarn":
            raise ConfigError(f"rope type {kind!r} needs a `factor`")
        factor = max_context / original
    return RopeSpec(
        kind=kind,
        theta=theta,
        factor=float(factor),
        original_context=original,
        low_freq_factor=float(values.get("low_freq_factor") or 1.0),
        high_freq_factor=float(values.get("high_freq_factor") or 4.0),
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        truncate=bool(values.get("truncate", True)),
        amplitude=_yarn_amplitude(values, float(factor)) if kind == "yarn" else 1.0,
    )


def _yarn_amplitude(values: Mapping[str, Any], factor: float) -> float:
    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])

    def grown(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all = values.get("mscale"), values.get("mscale_all_dim")
    if mscale and mscale_all:
        return grown(float(mscale)) / grown(float(mscale_all))
    return grown(1.0)


def frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """[head_dim / 2] float32, radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / (spec.theta**exponents)
    if spec.kind == "linear":
        return base / spec.factor
    if spec.kind == "llama3":
        return _llama3(base, spec)
    if spec.kind == "yarn":
        return _yarn(base, spec, head_dim)
    return base


def _llama3(base: Tensor, spec: RopeSpec) -> Tensor:
    """Rotations within the trained context decide: many stay, few are stretched, between them a blend."""
    rotations = spec.original_context * base / (2.0 * math.pi)
    keep = (rotations - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1.0 - keep) * base / spec.factor + keep * base


def _yarn(base: Tensor, spec: RopeSpec, head_dim: int) -> Tensor:
    def dimension(rotations: float) -> float:
        """Which dimension turns this often within the trained context."""
        wavelength = spec.original_context / (rotations * 2.0 * math.pi)
        return head_dim * math.log(wavelength) / (2.0 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return ramp * base / spec.factor + (1.0 - ramp) * base


class RopeTable:
    """cos and sin by position, in the form `rotary_` reads: both halves written out, the first half of sin negated."""

    def __init__(self, spec: RopeSpec, head_dim: int, max_context: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_context, dtype=torch.float32), frequencies(spec, head_dim))
        cos, sin = angles.cos() * spec.amplitude, angles.sin() * spec.amplitude
        self.cos = torch.cat((cos, cos), dim=-1).to(device)
        """[max_context, head_dim] float32, like `sin`."""
        self.sin = torch.cat((-sin, sin), dim=-1).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [tokens] int64 → cos, sin, each [tokens, 1, head_dim] float32."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
