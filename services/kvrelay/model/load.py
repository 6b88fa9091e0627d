"""A model directory and settings in, everything a worker wires together out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kvrelay.core.config import EngineSettings, ModelSettings
from kvrelay.core.errors import ConfigError
from kvrelay.core.handoff import KvIdentity
from kvrelay.core.kv import KvLayout
from kvrelay.core.progress import NullProgress, Progress
from kvrelay.model.checkpoint import weight_files
from kvrelay.model.device import choose_device, choose_dtype, choose_num_blocks, choose_numerics
from kvrelay.model.identity import identify
from kvrelay.model.obtain import obtain_gguf
from kvrelay.model.rope import RopeTable
from kvrelay.model.runner import TorchRunner
from kvrelay.model.sampler import Sampler
from kvrelay.model.spec import DecoderSpec, read_spec
from kvrelay.model.storage import DTYPES, KvStorage, capacity_line
from kvrelay.model.vocabulary import count_tokens
from kvrelay.model.weights import FORMATS, Weights, load_weights
from kvrelay_kernels.dispatch import ops_for


@dataclass(frozen=True, slots=True)
class LoadedModel:
    runner: TorchRunner
    storage: KvStorage
    identity: KvIdentity
    layout: KvLayout
    spec: DecoderSpec
    num_blocks: int
    max_context: int
    """Longest sequence that both the model and the pool (less one block to grow into) can hold."""
    num_tokens: int
    """Ids the tokenizer knows."""
    eos_token_ids: frozenset[int]
    served_name: str
    dtype: str
    kernels: str
    """Name of the set of operators that computes, such as "native/avx512_bf16"."""
    weights: Weights
    numerics: str
    """See `WorkerRecord.numerics`."""

    @property
    def capacity(self) -> str:
        room = capacity_line(self.layout, self.num_blocks, self.spec.max_context)
        return f"weights {self.weights.form or self.dtype}; {room}"


def served_name(settings: ModelSettings, directory: Path) -> str:
    """`--served-name`, else the last part of the path the user gave; demo and GGUF are known by their own names."""
    if settings.served_name:
        return settings.served_name
    if settings.path in ("demo", "demo-gguf"):
        return directory.name
    return settings.path.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a model and its settings ask for, known before a single weight is read."""

    spec: DecoderSpec
    device: torch.device
    dtype: str
    layout: KvLayout
    context: int
    num_tokens: int


def plan(directory: Path, model: ModelSettings, engine: EngineSettings) -> Plan:
    """Raises ConfigError with what cannot work: takes no memory, so `kvrelay up` asks before it starts anything."""
    if model.weights not in FORMATS:
        raise ConfigError(f"`model.weights` {model.weights!r} is not known; known: {', '.join(FORMATS)}")
    device = choose_device()
    dtype = choose_dtype(model.dtype, device)
    spec = read_spec(directory)
    weight_files(directory)
    num_tokens = min(count_tokens(directory), spec.vocab)
    layout = KvLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, engine.block_size, dtype)
    if engine.num_blocks or engine.kv_memory != "auto":
        choose_num_blocks(engine, layout, device)
    return Plan(spec, device, dtype, layout, _context(spec, model), num_tokens)


def load(
    directory: Path, model: ModelSettings, engine: EngineSettings, *, threads: int = 0, progress: Progress | None = None
) -> LoadedModel:
    """`directory` may be a GGUF; `threads` > 0 sets torch's compute threads. Raises ConfigError for what can't work."""
    told = progress or NullProgress()
    if directory.suffix == ".gguf" and not directory.is_dir():
        directory = obtain_gguf(directory, told)
    if threads > 0:
        torch.set_num_threads(threads)
    wanted = plan(directory, model, engine)
    spec, device, dtype, layout, context = wanted.spec, wanted.device, wanted.dtype, wanted.layout, wanted.context
    ops = ops_for(device, DTYPES[dtype], spec.head_dim)
    numerics = choose_numerics(model.numerics, ops, dtype)
    with torch.inference_mode():
        weights = load_weights(directory, spec, DTYPES[dtype], device, ops, told, model.weights)
        rope = RopeTable(spec.rope, spec.head_dim, context, device)
    num_blocks = choose_num_blocks(engine, layout, device)
    storage = KvStorage(layout, num_blocks, device, ops)  # outside: other threads write into it
    sampler = Sampler(ops, wanted.num_tokens, spec.eos_token_ids)
    return LoadedModel(
        runner=TorchRunner(spec, weights, storage, rope, sampler, ops),
        storage=storage,
        identity=identify(directory, spec, layout, weights.form),
        layout=layout,
        spec=spec,
        num_blocks=num_blocks,
        max_context=min(context, (num_blocks - 1) * engine.block_size),
        num_tokens=wanted.num_tokens,
        eos_token_ids=spec.eos_token_ids,
        served_name=served_name(model, directory),
        dtype=dtype,
        kernels=ops.name,
        weights=weights,
        numerics=numerics,
    )


def _context(spec: DecoderSpec, model: ModelSettings) -> int:
    if model.max_context > spec.max_context:
        raise ConfigError(f"`model.max_context` is {model.max_context}; the model itself ends at {spec.max_context}")
    return model.max_context or spec.max_context
