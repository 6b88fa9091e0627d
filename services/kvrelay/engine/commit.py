"""What a completed step, or a completed transfer, means for the sequences: tokens, ends, events, matchable blocks.

Blocks become matchable here and nowhere else: the step that computed them is over, or their transfer is verified.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvrelay.core.batch import RowResult, StepResult
from kvrelay.core.clock import Clock
from kvrelay.core.events import Committed, FailReason, FinishReason, FirstToken, Token, Tokens
from kvrelay.core.handoff import Commit
from kvrelay.core.ids import Choice, TransferId
from kvrelay.core.request import Leg
from kvrelay.engine.scheduler import Step
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.spec import EngineSpec
from kvrelay.engine.work import Work

Drawn = tuple[Choice, Token]


class Committer:
    """Applies results to sequences."""

    def __init__(self, spec: EngineSpec, work: Work, clock: Clock) -> None:
        self._spec = spec
        self._work = work
        self._clock = clock

    def apply(self, step: Step, result: StepResult) -> None:
        for seq, row, outcome in zip(step.seqs, step.plan.rows, result.rows, strict=True):
            if outcome.error is not None:
                self._work.fail_all(seq, FailReason.NAN_LOGITS, outcome.error)
                continue
            seq.num_computed += row.num_scheduled
            self._work.cache.register(seq.table, seq.tokens, seq.num_computed)
            if row.draws:
                self._drawn(seq, outcome)
            elif seq.leg is Leg.SEND:
                self._work.sendings.progress(seq)
                if seq.leaves_since is None:
                    seq.leaves_since = self._clock.now()

    def land(self, transfer_id: TransferId, commit: Commit) -> bool:
        """The KV of a reservation has arrived. False if the sequence is gone or was reserved for something else."""
        work = self._work
        seq = work.reservations.find_reserved(transfer_id)
        if seq is None or not self._is_for(seq, commit):
            return False
        going = {item.choice: item.tokens for item in commit.choices}
        alive = [choice for choice in seq.choices if choice in going]
        for choice in tuple(seq.choices):
            if choice not in going:
                work.fail(seq, choice, FailReason.CANCELLED, "ended with its first token at the sender")
        if not alive:
            return False
        work.reservations.land(transfer_id)
        work.run(seq)
        seq.num_computed = len(seq.tokens)
        seq.has_spoken = True
        work.cache.register(seq.table, seq.tokens, seq.num_computed)
        for child, choice in zip(work.fork(seq, alive), alive, strict=True):
            work.tell(Committed(child.key(choice), child.next_index, going[choice]))
            self._extend(child, choice, going[choice])
        return True

    @staticmethod
    def _is_for(seq: Sequence, commit: Commit) -> bool:
        choices = [item.choice for item in commit.choices]
        return (
            commit.num_tokens == len(seq.tokens)
            and len(set(choices)) == len(choices)
            and set(choices) <= set(seq.start.choices)
            and all(item.tokens for item in commit.choices)
        )

    def _drawn(self, seq: Sequence, outcome: RowResult) -> None:
        drawn: list[Drawn] = list(zip(tuple(seq.choices), outcome.tokens, strict=True))
        for choice, token in drawn:
            self._tell(seq, choice, token)
        seq.has_spoken = True
        if seq.leg is Leg.SEND:
            self._hand_over(seq, drawn)
            return
        children = self._work.fork(seq, [choice for choice, _ in drawn]) if len(drawn) > 1 else [seq]
        for child, (choice, token) in zip(children, drawn, strict=True):
            self._extend(child, choice, (token,))

    def _hand_over(self, seq: Sequence, drawn: Seq[Drawn]) -> None:
        index, going = seq.next_index, []
        for choice, token in drawn:
            reason = self._end(seq, index, token)
            if reason is None:
                going.append((choice, token))
            else:
                self._work.finish(seq, choice, reason)
        if going:
            self._work.running.remove(seq)
            self._work.sendings.finish(seq, going)

    def _extend(self, seq: Sequence, choice: Choice, tokens: Seq[Token]) -> None:
        """Append tokens to a sequence of one choice, up to the one that ends it."""
        for token in tokens:
            reason = self._end(seq, seq.next_index, token)
            seq.tokens.append(token.token_id)
            if seq.kept is not None:
                seq.kept.append(token)
            if reason is not None:
                self._work.finish(seq, choice, reason)
                return

    def _end(self, seq: Sequence, index: int, token: Token) -> FinishReason | None:
        """Why the choice ends with this token, if it does. A sender leaves the context limit to the receiver."""
        sampling = seq.start.sampling
        if token.token_id in seq.stops and index >= sampling.min_tokens:
            return FinishReason.STOP
        if index + 1 >= sampling.max_tokens:
            return FinishReason.LENGTH
        if seq.leg is not Leg.SEND and seq.num_prompt + index + 1 >= self._spec.max_sequence:
            return FinishReason.LENGTH
        return None

    def _tell(self, seq: Sequence, choice: Choice, token: Token) -> None:
        key, index = seq.key(choice), seq.next_index
        if seq.has_spoken:
            self._work.tell(Tokens(key, index, (token,)))
            return
        now, began = self._clock.now(), seq.scheduled_at or seq.arrived_at
        queue_ms, prefill_ms = (began - seq.arrived_at) * 1000, (now - began) * 1000
        overlap_ms = (now - (seq.leaves_since or now)) * 1000
        self._work.tell(FirstToken(key, index, token, seq.num_cached, queue_ms, prefill_ms, overlap_ms))
