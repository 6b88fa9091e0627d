"""Who computes how much in this step. One equation for everybody:

    scheduled = min(len(tokens) - num_computed, what is left of the step's token budget)

Sequences that lack one token (they are decoding) go first, then the longer chunks, then the queue while budget is
left; among the latter two, replays before new work, higher priority first, then first come. A sequence for whose
next token there is no block makes the newest running one go (perhaps itself): preemption. Its blocks stay cached,
and the router plays it again.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.core.batch import BlockCopy, Draw, Row, StepPlan
from kvrelay.core.clock import Clock
from kvrelay.core.config import EngineSettings
from kvrelay.core.events import FailReason
from kvrelay.core.request import Leg
from kvrelay.engine.admission import Admission
from kvrelay.engine.sequence import SeqState, Sequence
from kvrelay.engine.work import Work


@dataclass(frozen=True, slots=True)
class Step:
    """A plan and the sequences its rows belong to, in the same order."""

    plan: StepPlan
    seqs: tuple[Sequence, ...]


class Scheduler:
    """Turns the work into one plan per step."""

    def __init__(self, settings: EngineSettings, work: Work, admission: Admission, clock: Clock) -> None:
        self._settings = settings
        self._work = work
        self._admission = admission
        self._clock = clock
        self._num_steps = 0
        self._rows: dict[Sequence, tuple[Row, tuple[BlockCopy, ...]]] = {}
        self._budget = 0

    def schedule(self) -> Step | None:
        """The next step, or None if there is nothing to compute. May preempt; admits from the queue."""
        self._rows.clear()
        self._budget = self._settings.max_batch_tokens
        chunks = []
        for seq in tuple(self._work.running):
            if seq.num_remaining == 1:
                self._place(seq)
            else:
                chunks.append(seq)
        for seq in sorted(chunks, key=lambda seq: (not seq.start.replay, -seq.start.priority)):
            self._place(seq)
        while self._budget > 0 and (admitted := self._admission.next_to_compute()) is not None:
            self._place(admitted)
        if not self._rows:
            return None
        self._num_steps += 1
        rows = tuple(row for row, _ in self._rows.values())
        copies = tuple(copy for _, row_copies in self._rows.values() for copy in row_copies)
        return Step(StepPlan(self._num_steps, rows, copies), tuple(self._rows))

    def _place(self, seq: Sequence) -> None:
        """Give the sequence its share of the budget, making room by preemption if it must grow."""
        num_scheduled = min(seq.num_remaining, self._budget)
        if num_scheduled <= 0:
            return
        while seq.state is SeqState.RUNNING:
            end = seq.num_computed + num_scheduled
            copies = self._work.cache.prepare(seq.table, seq.num_computed, end)
            if copies is not None:
                self._budget -= num_scheduled
                self._rows[seq] = (self._row(seq, num_scheduled), copies)
                return
            self._preempt_newest(seq)

    def _preempt_newest(self, growing: Sequence) -> None:
        """Blocks of a sending sequence are lent to its transfer: letting it go would give nothing back now."""
        others = (seq for seq in reversed(self._work.running) if seq.leg is not Leg.SEND and seq.outgoing_id is None)
        victim = next(others, growing)
        if victim in self._rows:
            row, _ = self._rows.pop(victim)
            self._budget += row.num_scheduled
        self._work.fail_all(victim, FailReason.PREEMPTED, "no KV block left to grow into")

    def _row(self, seq: Sequence, num_scheduled: int) -> Row:
        if seq.scheduled_at is None:
            seq.scheduled_at = self._clock.now()
            if seq.leg is Leg.SEND:
                self._work.sendings.open(seq)
        draws: tuple[Draw, ...] = ()
        if num_scheduled == seq.num_remaining:
            index = seq.next_index
            draws = tuple(Draw(choice, index) for choice in seq.choices)
        return Row(
            seq.key(seq.choices[0]), seq.tokens, seq.start.num_prompt, seq.num_computed, num_scheduled,
            seq.table.blocks, seq.start.sampling, draws,
        )  # fmt: skip
