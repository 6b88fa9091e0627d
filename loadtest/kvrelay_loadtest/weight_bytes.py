"""What a decode step must read of a model's weights: the packed linear layers and the head, each once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from kvrelay.model.weights import Weights


def weight_bytes(weights: Weights) -> int:
    """As packed: codes, scales and padding. Norms, biases and the rows of the embedding are left out."""
    linears = [
        linear.packed for layer in weights.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ]
    tensors = {id(tensor): tensor for packed in (*linears, weights.head.packed) for tensor in tensors_of(packed)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def tensors_of(packed: Any) -> Iterator[Tensor]:
    """Those that a kernel set's own form of a weight is made of."""
    if isinstance(packed, Tensor):
        yield packed
    elif is_dataclass(packed):
        for item in fields(packed):
            yield from tensors_of(getattr(packed, item.name))
    elif isinstance(packed, list | tuple):
        for item in packed:
            yield from tensors_of(item)
