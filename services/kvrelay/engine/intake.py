"""A `Start` comes in: it is refused, or over already, or it becomes a sequence that waits or holds a reservation.

It is over when the output it brings along ends in a stop token, or is as long as it may get: a caller who resumes, or
a stream that is replayed, may lack nothing but the end.
"""

from __future__ import annotations

import math

from kvrelay.core.config import EngineSettings
from kvrelay.core.events import FailReason, Finished, FinishReason, Refused, RefuseReason
from kvrelay.core.ids import Choice
from kvrelay.core.ports import Refusal
from kvrelay.core.request import MAX_LOGPROBS, Leg, SamplingParams, Start
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


def sampling_fault(sampling: SamplingParams, vocab_size: int) -> str:
    """What a sampler could not draw with. A router has refused it long before; this is for one that has not."""
    numbers = {
        name: getattr(sampling, name)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    }
    for name, value in numbers.items():
        if not math.isfinite(value):
            return f"{name} is {value}"
    for token_id, bias in sampling.logit_bias:
        if not 0 <= token_id < vocab_size:
            return f"logit_bias: {token_id} is not in [0, {vocab_size})"
        if not math.isfinite(bias):
            return f"logit_bias of {token_id} is {bias}"
    if sampling.temperature < 0 or sampling.repetition_penalty <= 0:
        return "temperature must not be below 0, repetition_penalty must be above it"
    if sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}"
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        return f"logprobs must be from 0 to {MAX_LOGPROBS}, found {sampling.logprobs}"
    return ""


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
        end = self._end(start) if refusal is None else None
        if end is not None:
            for choice in start.choices:
                self._work.tell(Finished(start.key(choice), end))
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

    def _end(self, start: Start) -> FinishReason | None:
        """Why there is nothing left to draw, if there is nothing."""
        last, sampling = start.next_index - 1, start.sampling
        if last >= sampling.min_tokens and last >= 0 and start.token_ids[-1] in self._stops(sampling):
            return FinishReason.STOP
        return FinishReason.LENGTH if start.next_index >= sampling.max_tokens else None

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
        if misfit and self._end(start) is None:
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
        top = self._spec.vocab_size or 1 << 32
        if min(start.token_ids) < 0 or max(start.token_ids) >= top:
            return f"token ids must be in [0, {top})"
        return sampling_fault(start.sampling, top) or self._transfer_fault(start)

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
