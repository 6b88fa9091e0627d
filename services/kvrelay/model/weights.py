"""From safetensors, one file or many, straight into the tensors the decoder multiplies with: qkv and gate-up fused.

At no moment is more than one source tensor in memory beside what has been built.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvrelay.core.errors import ConfigError
from kvrelay.core.progress import Progress
from kvrelay.model.spec import DecoderSpec, read_json
from kvrelay_kernels.dispatch import Ops, Packed


@dataclass(frozen=True, slots=True)
class Linear:
    packed: Packed
    """[out, in] in the form of the kernel set it was packed by."""
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: Tensor
    qkv: Linear
    """[(heads + 2·kv_heads) · head_dim, hidden]: query, key, value."""
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    """[2·ffn, hidden]: gate, up."""
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Tensor
    """[vocab, hidden]."""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Linear


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in name order. Raises ConfigError if there are none or one is missing."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
    else:
        names = [path.name for path in sorted(directory.glob("*.safetensors"))]
    if not names:
        raise ConfigError(f"{directory} holds no *.safetensors; other weight formats are not read")
    missing = [name for name in names if not (directory / name).exists()]
    if missing:
        raise ConfigError(f"{directory} lacks {', '.join(missing)}, which its index names")
    return [directory / name for name in names]


def load_weights(
    directory: Path, spec: DecoderSpec, dtype: torch.dtype, device: torch.device, ops: Ops, progress: Progress
) -> Weights:
    progress.start("load weights", spec.num_layers)
    with Checkpoint(directory) as checkpoint:
        builder = _Builder(checkpoint, spec, dtype, device, ops.pack)
        embedding = builder.whole("model.embed_tokens.weight", spec.vocab, spec.hidden)
        layers = []
        for layer in range(spec.num_layers):
            layers.append(builder.layer(layer))
            progress.advance(1)
        final_norm = builder.whole("model.norm.weight", spec.hidden)
        head = embedding if spec.tied else builder.whole("lm_head.weight", spec.vocab, spec.hidden)
    progress.done()
    return Weights(embedding, tuple(layers), final_norm, Linear(ops.pack(head)))


class Checkpoint:
    """Every tensor of a checkpoint by name, read when asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Checkpoint:
        for path in weight_files(self._directory):
            try:
                file = self._open.enter_context(safe_open(str(path), framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"cannot read {path}: {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def read(self, name: str) -> Tensor:
        if name not in self._files:
            raise ConfigError(f"{self._directory}: the checkpoint has no tensor {name}")
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


class _Builder:
    def __init__(
        self, checkpoint: Checkpoint, spec: DecoderSpec, dtype: torch.dtype, device: torch.device,
        pack: Callable[[Tensor], Packed],
    ) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._pack = pack

    def layer(self, layer: int) -> LayerWeights:
        spec, at = self._spec, f"model.layers.{layer}."
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        attention, mlp = at + "self_attn.", at + "mlp."
        parts = [(attention + "q_proj", q), (attention + "k_proj", kv), (attention + "v_proj", kv)]
        return LayerWeights(
            input_norm=self.whole(at + "input_layernorm.weight", spec.hidden),
            qkv=self._linear(parts, spec.hidden, spec.qkv_bias),
            q_norm=self.whole(attention + "q_norm.weight", spec.head_dim) if spec.qk_norm else None,
            k_norm=self.whole(attention + "k_norm.weight", spec.head_dim) if spec.qk_norm else None,
            output=self._linear([(attention + "o_proj", spec.hidden)], q, spec.o_bias),
            post_norm=self.whole(at + "post_attention_layernorm.weight", spec.hidden),
            gate_up=self._linear([(mlp + "gate_proj", spec.ffn), (mlp + "up_proj", spec.ffn)], spec.hidden, False),
            down=self._linear([(mlp + "down_proj", spec.hidden)], spec.ffn, False),
        )

    def whole(self, name: str, *shape: int) -> Tensor:
        return self._fused([(name, shape[0])], shape[1:])

    def _linear(self, parts: list[tuple[str, int]], inputs: int, has_bias: bool) -> Linear:
        weight = self._fused([(f"{name}.weight", rows) for name, rows in parts], (inputs,))
        bias = self._fused([(f"{name}.bias", rows) for name, rows in parts], ()) if has_bias else None
        return Linear(self._pack(weight), bias)

    def _fused(self, parts: list[tuple[str, int]], rest: tuple[int, ...]) -> Tensor:
        """The named tensors, one below the other."""
        fused = torch.empty((sum(rows for _, rows in parts), *rest), dtype=self._dtype, device=self._device)
        begin = 0
        for name, rows in parts:
            source = self._checkpoint.read(name)
            if tuple(source.shape) != (rows, *rest):
                raise ConfigError(f"{name} has shape {list(source.shape)}; config.json asks for {[rows, *rest]}")
            fused[begin : begin + rows].copy_(source)
            begin += rows
        return fused
