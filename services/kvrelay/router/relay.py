"""An attempt that takes two workers: prefill computes the prompt and hands over, decode goes on.

    ISSUED ─Reserved─▶ PREFILL ─FirstToken─▶ shown at once ─Committed─▶ RUNNING ─Finished*─▶ over
      decode's leg       prefill's leg          │               decode's leg
      └─ refused, failed, lost before Committed: both legs cancelled, the choices are lost (replay)
                                                └─ Finished(stop | length) of the first token: that choice
                                                   is done; nothing left for decode: Cancel

`Committed` is the only proof of a handoff, per choice. Until then a failure of either side loses the choice; after it
nothing that prefill says matters. Events of both streams race; every order ends the same. So what decode says from
`Committed` on is kept until prefill's `FirstToken`, which was said earlier, is here: a short answer could otherwise be
over before it is known what was cached. Whatever else prefill says, or its loss, ends the wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvrelay.core.events import (
    Committed,
    Event,
    Failed,
    FailReason,
    Finished,
    FinishReason,
    FirstToken,
    Leaving,
    Refused,
    Reserved,
    Stayed,
    Token,
    Tokens,
)
from kvrelay.core.handoff import Handoff, Receiver
from kvrelay.core.ids import Attempt, Choice, TransferId, WorkerId
from kvrelay.core.placement import WorkerRecord
from kvrelay.core.request import Leg
from kvrelay.router.attempt import AttemptOwner, Plan, finish, refuse, unexpected
from kvrelay.router.leg import WorkerLeg
from kvrelay.router.link_port import Arrival, LegSignal, LinkPort, Lost
from kvrelay.router.replay import Loss, loss_of
from kvrelay.router.token_log import ProtocolError


class RelayAttempt:
    """Reserve on decode, prefill with the handoff, go on with decode."""

    def __init__(
        self, plan: Plan, owner: AttemptOwner, prefill: LinkPort, decode: LinkPort, transfer_id: TransferId
    ) -> None:
        self.number: Attempt = plan.start.attempt
        self.open: set[Choice] = set(plan.start.choices)
        self._owner = owner
        self._plan = plan
        self._prefill_link = prefill
        self._transfer_id = transfer_id
        self._decode = WorkerLeg(decode, replace(plan.start, leg=Leg.RECEIVE, transfer_id=transfer_id))
        self._prefill: WorkerLeg | None = None
        self._committed: set[Choice] = set()
        self._has_first_token = False
        self._kept: list[Arrival] = []
        """What decode has said since a `Committed` that came before the `FirstToken`."""

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return (self._prefill_link.record.worker_id, self._decode.worker_id)

    @property
    def record(self) -> WorkerRecord:
        return self._decode.record

    def migrate(self, choice: Choice, to_attempt: Attempt, num_tokens: int, handoff: Handoff) -> None:
        self._decode.migrate(choice, to_attempt, num_tokens, handoff)

    def let_go(self, choice: Choice) -> None:
        self.open.discard(choice)
        self._decode.cancel_choice(choice)
        self._settle()

    def lose(self, choice: Choice, loss: Loss) -> None:
        self._lose({choice}, loss)

    def begin(self) -> None:
        self._owner.moments.on_issued()
        self._decode.begin(self._plan.deliver, self._plan.num_blocks)

    def cancel(self) -> None:
        self.open.clear()
        self._kept.clear()
        self._decode.cancel()
        if self._prefill is not None:
            self._prefill.cancel()

    def on_signal(self, signal: LegSignal) -> None:
        if signal.worker_id == self._decode.worker_id:
            if isinstance(signal, Arrival) and self._is_early(signal.event):
                self._kept.append(signal)
            else:
                self._give_kept()
                self._on_decode(signal)
        elif self._prefill is not None:
            if isinstance(signal, Arrival) and isinstance(signal.event, FirstToken):
                self._has_first_token = True
                self._on_prefill(self._prefill, signal)
                self._give_kept()
            else:
                self._give_kept()
                self._on_prefill(self._prefill, signal)

    def _is_early(self, event: Event) -> bool:
        if self._has_first_token or self._prefill is None or not self._prefill.open:
            return False
        return bool(self._kept) or isinstance(event, Committed)

    def _give_kept(self) -> None:
        kept, self._kept = self._kept, []
        for signal in kept:
            self._on_decode(signal)

    # Decode's leg.

    def _on_decode(self, signal: LegSignal) -> None:
        if isinstance(signal, Lost):
            self._decode.gone()
            self._lose(self.open, Loss("link", signal.why, (signal.worker_id,)))
            return
        event = signal.event
        choice = event.key.choice
        match event:
            case Refused():
                self._decode.gone()
                refuse(self._owner, self.open, signal)
            case Reserved():
                self._send(event, signal.receivers)
            case Committed():
                self._committed.add(choice)
                self._owner.moments.on_committed()
                self._accept(choice, event.first_index, event.tokens)
            case Tokens():
                self._owner.moments.on_tokens()
                self._accept(choice, event.first_index, event.tokens)
            case Finished():
                self._decode.ended(choice)
                finish(self._owner, self.open, event)
                self._settle()
            case Failed():
                self._decode.ended(choice)
                self._on_decode_failed(event)
            case Leaving():
                if choice in self.open:
                    self._owner.moves.want(choice, self)
            case Stayed():
                self._owner.moves.stayed(choice, event.transfer_id)
            case FirstToken():
                self._lose({choice}, unexpected(event, self.workers))

    def _send(self, reserved: Reserved, receivers: tuple[Receiver, ...]) -> None:
        if self._prefill is not None or not self.open:
            return
        self._owner.moments.on_reserved()
        handoff = Handoff(self._transfer_id, receivers, reserved.num_cached_tokens)
        start = replace(
            self._decode.start, leg=Leg.SEND, handoff=handoff, choices=tuple(sorted(self.open)),
            timeout_ms=self._plan.timeout_ms(),
        )
        self._prefill = WorkerLeg(self._prefill_link, start)
        self._prefill.begin(self._plan.deliver, self._plan.num_prefill_blocks)

    def _on_decode_failed(self, failed: Failed) -> None:
        choice = failed.key.choice
        if choice not in self.open:
            return
        if failed.reason is FailReason.CANCELLED and self._prefill is not None and choice in self._prefill.open:
            return  # not in the commit: it ended with its first token, and prefill's own stream is about to say so
        lost = {choice} if choice in self._committed else self.open - self._committed
        at_fault = self.workers if failed.reason is FailReason.TRANSFER else (self._decode.worker_id,)
        self._lose(lost, loss_of(failed, *at_fault))

    def _settle(self) -> None:
        """Decode is through. What prefill still has to say about a committed handoff interests nobody, and a choice
        that was not in the commit gets no last word from decode."""
        if not self.open:
            self._decode.gone()
            if self._prefill is not None:
                self._prefill.gone()

    # Prefill's leg.

    def _on_prefill(self, leg: WorkerLeg, signal: LegSignal) -> None:
        uncommitted = self.open - self._committed
        if isinstance(signal, Lost):
            leg.gone()
            self._lose(uncommitted, Loss("link", signal.why, (signal.worker_id,)))
            return
        event = signal.event
        choice = event.key.choice
        match event:
            case Refused():
                leg.gone()
                self._decode.cancel()
                refuse(self._owner, self.open, signal)
            case FirstToken():
                self._owner.moments.on_first_token(event)
                self._owner.cached(event.num_cached_tokens)
                self._accept(choice, event.index, (event.token,))
            case Finished():
                leg.ended(choice)
                if event.reason is not FinishReason.HANDED_OFF and choice not in self._committed:
                    self._finish_early(event)
                elif choice in uncommitted and choice not in self._decode.open:
                    self._lose({choice}, Loss("transfer", "handed over, but decode gave it up", self.workers))
            case Failed():
                leg.ended(choice)
                if choice in uncommitted:
                    at_fault = self.workers if event.reason is FailReason.TRANSFER else (leg.worker_id,)
                    self._lose(uncommitted, loss_of(event, *at_fault))
            case _:
                self._lose(uncommitted, unexpected(event, (leg.worker_id,)))

    def _finish_early(self, finished: Finished) -> None:
        """The first token was the last. Decode drops the choice when the commit comes without it."""
        finish(self._owner, self.open, finished)
        if not self.open:
            self.cancel()

    # Both.

    def _accept(self, choice: Choice, first_index: int, tokens: Sequence[Token]) -> None:
        if choice not in self.open:
            return
        try:
            if self._owner.accept(choice, first_index, tokens):
                return
        except ProtocolError as error:
            self._lose({choice}, Loss("protocol", str(error), self.workers))
            return
        self.open.discard(choice)
        self._cancel_choice(choice)

    def _lose(self, choices: set[Choice], loss: Loss) -> None:
        lost = sorted(choices & self.open)
        self.open.difference_update(lost)
        if not self.open:
            self.cancel()
        for choice in lost:
            self._cancel_choice(choice)
        if lost:
            self._owner.lost(lost, loss)

    def _cancel_choice(self, choice: Choice) -> None:
        if not self.open:
            self.cancel()
            return
        self._decode.cancel_choice(choice)
        if self._prefill is not None:
            self._prefill.cancel_choice(choice)
