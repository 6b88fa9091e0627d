"""Counts the steps of a runner on their way through. Engine thread only."""

from __future__ import annotations

from kvrelay.core.batch import Runner, StepPlan, StepResult
from kvrelay.core.clock import Clock
from kvrelay.observe.metrics import WorkerMetrics


class MeteredRunner:
    def __init__(self, runner: Runner, metrics: WorkerMetrics, clock: Clock) -> None:
        self._runner = runner
        self._metrics = metrics
        self._clock = clock

    def run(self, plan: StepPlan) -> StepResult:
        began = self._clock.now()
        result = self._runner.run(plan)
        self._metrics.step_completed(self._clock.now() - began, plan.num_tokens)
        return result
