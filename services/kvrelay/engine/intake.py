"""A `Start` comes in: it is refused, or over already, or it becomes a sequence that waits or holds a reservation.

It is over when the output it brings along ends in a stop token: a caller who resumes may have everything but the end.
"""

from __future__ import annotations

from kvrelay.core.config import EngineSettings
from kvrelay.core.events import FailReason, Finished, FinishReason, Refused, RefuseReason
from kvrelay.core.ids import Choice
from kvrelay.core.ports import Refusal
from kvrelay.core.request import Leg, SamplingParams, Start
from kvrelay.engine.admission import Admission
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.spec import EngineSpec
from kvrelay.engine.work import Work

RETRY_AFTER_MS = 500
"""A guess at when room appears: a stream of some hundred tokens ends every few hundred ms on a busy worker."""


def leg_of(start: Start) -> Leg:
    """A SEND whose one drawn token is the last one has nothing to hand over."""
    is_last = start.sampling.max_tokens - start.next_index == 1
    return Leg.LOCAL if start.leg is Leg.SEND and is_last else start.leg


class Intake:
    """Decides about a `Start` the moment the engine sees it."""

    def __init__(self, settings: EngineSettings, spec: EngineSpec, work: Work, admission: Admission) -> None:
        self._settings = settings
        self._spec = spec
        self._work = work
        self._admission = admission
        self.is_draining = False

    def accept(self, start: Start, arrived_at: float) -> None:
        refusal = self._refusal(start)
        if refusal is None and self._is_over(start):
            self._work.tell(Finished(start.key(start.choices[0]), FinishReason.STOP))
        elif refusal is None:
            seq = self._sequence(start, arrived_at)
            if seq.leg is Leg.RECEIVE and not start.replay:
                refusal = self._reserve_now(seq)
            else:
                self._work.add(seq)
                self._work.waiting.add(seq)
        if refusal is not None:
            for choice in start.choices:
                key = start.key(choice)
                self._work.tell(Refused(key, refusal.reason, refusal.message, refusal.retry_after_ms))

    def drain(self) -> None:
        """Nothing is admitted from now on: what only waits had better wait elsewhere."""
        self.is_draining = True
        for seq in tuple(self._work.waiting):
            self._work.fail_all(seq, FailReason.DRAINING, "this worker takes no more work")

    def _is_over(self, start: Start) -> bool:
        last = start.next_index - 1
        return last >= start.sampling.min_tokens and last >= 0 and start.token_ids[-1] in self._stops(start.sampling)

    def _stops(self, sampling: SamplingParams) -> frozenset[int]:
        eos = frozenset[int]() if sampling.ignore_eos else self._spec.eos_token_ids
        return eos | frozenset(sampling.stop_token_ids)

    def _reserve_now(self, seq: Sequence) -> Refusal | None:
        """New work is never parked with a reservation in mind: it gets one now, or somebody else may have it."""
        head = self._work.waiting.head
        if head is not None and (head.start.replay or self._work.is_short_of_room):
            return Refusal(RefuseReason.NO_ROOM, "earlier work waits for KV blocks", RETRY_AFTER_MS)
        if not self._admission.reserve(seq):
            return Refusal(RefuseReason.NO_ROOM, "no KV blocks or no row for this sequence now", RETRY_AFTER_MS)
        self._work.add(seq)
        return None

    def _refusal(self, start: Start) -> Refusal | None:
        if self.is_draining:
            return Refusal(RefuseReason.DRAINING, "this worker takes no more work")
        fault = self._fault(start)
        if fault:
            return Refusal(RefuseReason.BAD_START, fault)
        misfit = self._admission.never_fits(start, leg_of(start))
        if misfit:
            return Refusal(RefuseReason.NEVER_FITS, misfit)
        if len(self._work.waiting) >= self._settings.max_waiting and not start.replay and start.leg is not Leg.RECEIVE:
            message = f"{self._settings.max_waiting} requests wait already"
            return Refusal(RefuseReason.QUEUE_FULL, message, RETRY_AFTER_MS)
        return None

    def _fault(self, start: Start) -> str:
        """What is wrong with it, empty if nothing: a fault must not get as far as the runner."""
        if not start.choices or len(set(start.choices)) != len(start.choices):
            return "choices must be there and differ"
        if any(start.key(choice) in self._work.by_key for choice in start.choices):
            return "this choice and attempt is running already"
        if not 0 < start.num_prompt <= start.num_tokens:
            return f"num_prompt {start.num_prompt} of {start.num_tokens} tokens"
        if len(start.choices) > 1 and start.next_index > 0:
            return "choices that have output are started one by one"
        if start.sampling.max_tokens <= start.next_index:
            return f"max_tokens {start.sampling.max_tokens} leaves nothing to draw at index {start.next_index}"
        top = self._spec.vocab_size or 1 << 32
        if min(start.token_ids) < 0 or max(start.token_ids) >= top:
            return f"token ids must be in [0, {top})"
        return self._transfer_fault(start)

    def _transfer_fault(self, start: Start) -> str:
        leg, transfer_id = leg_of(start), start.transfer_id
        if leg is Leg.LOCAL:
            return ""
        if transfer_id is None:
            return f"a {leg.value} start needs a transfer id"
        if transfer_id in self._work.reservations or transfer_id in self._work.sendings:
            return f"transfer {transfer_id} exists already"
        if any(seq.start.transfer_id == transfer_id for seq in self._work.waiting):
            return f"transfer {transfer_id} waits already"
        if leg is Leg.SEND:
            return self._handoff_fault(start)
        return ""

    def _handoff_fault(self, start: Start) -> str:
        handoff = start.handoff
        if handoff is None:
            return "a send start needs a handoff"
        if handoff.transfer_id != start.transfer_id:
            return "handoff and start name different transfers"
        if not 0 <= handoff.num_cached_tokens < start.num_tokens or handoff.num_cached_tokens % self._spec.block_size:
            return f"the receiver cannot have {handoff.num_cached_tokens} of {start.num_tokens} tokens cached"
        return ""

    def _sequence(self, start: Start, arrived_at: float) -> Sequence:
        choices: list[Choice] = list(start.choices)
        tokens = list(start.token_ids)
        return Sequence(
            start=start, leg=leg_of(start), choices=choices, tokens=tokens,
            table=self._work.cache.new_table(tokens, start.cache_salt), stops=self._stops(start.sampling),
            arrived_at=arrived_at, deadline=arrived_at + start.timeout_ms / 1000,
            keys={choice: start.key(choice) for choice in choices},
        )  # fmt: skip
