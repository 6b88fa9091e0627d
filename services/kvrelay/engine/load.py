"""How busy this worker is, measured: the beat that routers place by."""

from __future__ import annotations

from kvrelay.core.batch import StepPlan
from kvrelay.core.placement import Load
from kvrelay.core.request import Leg
from kvrelay.engine.sequence import SeqState
from kvrelay.engine.work import Work

STEP_WEIGHT = 0.1
"""Of the newest step in the moving average: the last twenty or so count."""
PREFILL_DECAY = 0.9
"""Of tokens and seconds per prefill step; their quotient weighs long chunks more than short ones."""


class LoadMeter:
    """Moving averages over steps, and the counts of the moment."""

    def __init__(self) -> None:
        self._step_ms = 0.0
        self._prefill_tokens = 0.0
        self._prefill_s = 0.0

    def after_step(self, plan: StepPlan, seconds: float) -> None:
        step_ms = seconds * 1000
        self._step_ms = self._step_ms + STEP_WEIGHT * (step_ms - self._step_ms) if self._step_ms else step_ms
        num_tokens = plan.num_tokens
        if num_tokens > len(plan.rows):
            self._prefill_tokens = self._prefill_tokens * PREFILL_DECAY + num_tokens
            self._prefill_s = self._prefill_s * PREFILL_DECAY + seconds

    def report(self, work: Work, *, draining: bool) -> Load:
        pool = work.cache.pool
        computing = [seq for seq in work.running if seq.num_remaining > 1]
        waiting_tokens = sum(seq.num_remaining for seq in computing)
        waiting_tokens += sum(seq.num_remaining for seq in work.waiting if seq.leg is not Leg.RECEIVE)
        return Load(
            num_blocks=pool.num_blocks,
            num_free=pool.num_free,
            num_cached=pool.num_cached,
            num_held=pool.num_held,
            num_draining=pool.num_draining,
            num_running=sum(len(seq.choices) for seq in work.running),
            num_waiting=len(work.waiting),
            num_reserved=work.reservations.num_reserved,
            num_sending=sum(1 for seq in work.sendings if seq.state is SeqState.SENDING),
            waiting_tokens=waiting_tokens,
            prefill_tokens_per_s=self._prefill_tokens / self._prefill_s if self._prefill_s > 0 else 0.0,
            step_ms=self._step_ms,
            draining=draining,
        )
