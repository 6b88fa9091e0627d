"""Computes one step: copies, forward pass, samples. The engine thread calls it and waits."""

from __future__ import annotations

import torch

from kvrelay.core.batch import RowResult, StepPlan, StepResult
from kvrelay.model import decoder
from kvrelay.model.inputs import build_step
from kvrelay.model.one_call import build_batch, one_call_decoder
from kvrelay.model.rope import RopeTable
from kvrelay.model.sampler import Sampler
from kvrelay.model.spec import DecoderSpec
from kvrelay.model.storage import KvStorage
from kvrelay.model.weights import Weights
from kvrelay_kernels.dispatch import Ops


class TorchRunner:
    """Implements `core.batch.Runner`."""

    def __init__(
        self, spec: DecoderSpec, weights: Weights, storage: KvStorage, rope: RopeTable, sampler: Sampler, ops: Ops
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._storage = storage
        self._rope = rope
        self._sampler = sampler
        self._ops = ops
        self._one_call = one_call_decoder(spec, weights, storage, rope, ops)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        if plan.copies:
            self._storage.copy([copy.source for copy in plan.copies], [copy.target for copy in plan.copies])
        if not plan.rows:
            return StepResult(())
        return StepResult(self._results(plan, self._logits(plan)))

    @torch.inference_mode()
    def every_logits(self, plan: StepPlan) -> torch.Tensor:
        """[tokens of the plan, vocab] float32: how likely the model finds a text, nothing drawn. Writes KV as `run`."""
        return self._logits(plan, every_token=True)

    def _logits(self, plan: StepPlan, *, every_token: bool = False) -> torch.Tensor:
        """[drawing rows, vocab] float32, or [tokens, vocab]."""
        if self._one_call is not None:
            batch = build_batch(plan, self._storage.layout.block_size, every_token=every_token)
            return self._one_call.step(batch)
        step = build_step(plan, self._spec, self._storage, self._rope, self._ops, every_token=every_token)
        hidden = decoder.forward(self._spec, self._weights, self._ops, self._storage.layers, step)
        return decoder.logits(self._spec, self._weights, self._ops, hidden)

    def _results(self, plan: StepPlan, logits: torch.Tensor) -> tuple[RowResult, ...]:
        drawing = [row for row in plan.rows if row.draws]
        if not drawing:
            return tuple(RowResult(()) for _ in plan.rows)
        sampled = iter(self._sampler.sample(drawing, logits))
        return tuple(next(sampled) if row.draws else RowResult(()) for row in plan.rows)
