"""From a checkpoint straight into what the decoder multiplies with: qkv and gate-up fused, in the wanted format.

    auto   as the file has it: floats in the compute dtype, the codes of a GGUF as they are
    bf16   floats in the compute dtype, codes written out
    int8   one scale per output row; codes stay, they are at most that wide
    int4   groups of 32 with scale and offset; embedding and head in int8, 4-bit codes stay

Floats are copied one tensor at a time; of codes one fused group is in memory beside what has been built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvrelay.core.errors import ConfigError
from kvrelay.core.progress import Progress
from kvrelay.model.checkpoint import Checkpoint, open_checkpoint
from kvrelay.model.spec import DecoderSpec
from kvrelay_kernels.dispatch import Ops, Packed
from kvrelay_kernels.linear.quantised import GROUP, QuantisedWeight, quantise_groups, quantise_rows, stack

FORMATS = ("auto", "bf16", "int8", "int4")
Weight = Tensor | QuantisedWeight


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
    embedding: Weight
    """[vocab, hidden]."""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Linear
    form: str
    """What the numbers went through, such as "Q4_1+Q8_0" or "int8"; empty: floats as the checkpoint has them."""


def load_weights(
    directory: Path, spec: DecoderSpec, dtype: torch.dtype, device: torch.device, ops: Ops, progress: Progress,
    form: str = "auto",
) -> Weights:
    """`form`: one of FORMATS."""
    progress.start("load weights", spec.num_layers)
    with open_checkpoint(directory) as checkpoint:
        shown = described(checkpoint.types, form)
        builder = _Builder(checkpoint, spec, dtype, device, ops.pack, form)
        embedding = builder.table("model.embed_tokens.weight")
        layers = []
        for layer in range(spec.num_layers):
            layers.append(builder.layer(layer))
            progress.advance(1)
        final_norm = builder.whole("model.norm.weight", spec.hidden)
        head = embedding if spec.tied else builder.table("lm_head.weight")
    progress.done()
    return Weights(embedding, tuple(layers), final_norm, Linear(ops.pack(head)), shown)


def described(types: Sequence[str], form: str) -> str:
    """See `Weights.form`. `types`: what a checkpoint holds beside floats."""
    if form == "bf16" or (form == "auto" and not types):
        return ""
    held = "+".join(types)
    if form == "auto":
        return held
    return f"{form} of {held}" if held else form


Parts = Sequence[tuple[str, int]]
"""Names and rows."""


class _Builder:
    def __init__(
        self, checkpoint: Checkpoint, spec: DecoderSpec, dtype: torch.dtype, device: torch.device,
        pack: Callable[[Weight], Packed], form: str,
    ) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._pack = pack
        self._form = form

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

    def table(self, name: str) -> Weight:
        """[vocab, hidden]: the embedding or the head. 4 bits are too few for either: int8 then."""
        form = "int8" if self._form == "int4" else self._form
        return self._weight([(name, self._spec.vocab)], self._spec.hidden, form)

    def whole(self, name: str, size: int) -> Tensor:
        """A vector."""
        return self._floats([(name, size)], ())

    def _linear(self, parts: Parts, inputs: int, has_bias: bool) -> Linear:
        weight = self._weight([(f"{name}.weight", rows) for name, rows in parts], inputs, self._form)
        bias = self._floats([(f"{name}.bias", rows) for name, rows in parts], ()) if has_bias else None
        return Linear(self._pack(weight), bias)

    def _weight(self, parts: Parts, inputs: int, form: str) -> Weight:
        """The named matrices, one below the other, in `form`."""
        all_coded = all(self._checkpoint.is_coded(name) for name, _ in parts)
        if form == "bf16" or (form == "auto" and not all_coded):
            return self._floats(parts, (inputs,))
        sources = [self._read(name, (rows, inputs)) for name, rows in parts]
        return stack([_codes(source, form, keep=all_coded) for source in sources])

    def _floats(self, parts: Parts, rest: tuple[int, ...]) -> Tensor:
        """The named tensors, one below the other, in the compute dtype."""
        fused = torch.empty((sum(rows for _, rows in parts), *rest), dtype=self._dtype, device=self._device)
        begin = 0
        for name, rows in parts:
            source = self._read(name, (rows, *rest))
            fused[begin : begin + rows].copy_(source.dequantise() if isinstance(source, QuantisedWeight) else source)
            begin += rows
        return fused

    def _read(self, name: str, shape: tuple[int, ...]) -> Weight:
        source = self._checkpoint.read(name)
        if tuple(source.shape) != shape:
            raise ConfigError(f"{name} has shape {list(source.shape)}; config.json asks for {list(shape)}")
        return source


def _codes(source: Weight, form: str, *, keep: bool) -> QuantisedWeight:
    """`keep`: codes that are narrow enough stay as they are, because all they are fused with are codes too."""
    if isinstance(source, QuantisedWeight):
        if keep and (form != "int4" or source.bits == 4):
            return source
        source = source.dequantise()
    if form == "int4" and source.shape[1] % GROUP == 0:
        return quantise_groups(source)
    return quantise_rows(source)
