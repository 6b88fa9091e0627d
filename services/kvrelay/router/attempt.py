"""One attempt at one or more choices: what it may do to its request, and the kind that one worker does alone.

    ISSUED ─FirstToken─▶ RUNNING ─Finished*─▶ over
       └─ refused, failed, lost: the choices are lost (replay)

`relay.RelayAttempt` takes two workers, `move.MoveAttempt` takes a choice from one worker to another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.core.errors import Broken
from kvrelay.core.events import (
    Event,
    Failed,
    Finished,
    FinishReason,
    FirstToken,
    Leaving,
    Refused,
    RefuseReason,
    Stayed,
    Token,
    Tokens,
)
from kvrelay.core.handoff import Handoff
from kvrelay.core.ids import Attempt, Choice, TransferId, WorkerId
from kvrelay.core.placement import WorkerRecord
from kvrelay.core.request import Start
from kvrelay.router.leg import WorkerLeg
from kvrelay.router.link_port import Arrival, Deliver, LegSignal, LinkPort, Lost
from kvrelay.router.replay import Loss, loss_of
from kvrelay.router.timing import Moments
from kvrelay.router.token_log import ProtocolError


class AttemptOwner(Protocol):
    """What an attempt may do to its request. The coordinator implements it."""

    @property
    def moments(self) -> Moments: ...

    @property
    def moves(self) -> MovesPort: ...

    def accept(self, choice: Choice, first_index: int, tokens: Sequence[Token]) -> bool:
        """False: the choice is done (a stop string). Raises ProtocolError if the tokens do not fit."""
        ...

    def cached(self, num_tokens: int) -> None: ...

    def finish(self, choice: Choice, reason: FinishReason) -> None: ...

    def refused(self, choices: Sequence[Choice], worker_id: WorkerId, refusal: Refused) -> None: ...

    def lost(self, choices: Sequence[Choice], loss: Loss) -> None: ...


class MovesPort(Protocol):
    """What a worker has to say about choices that it wants to be rid of. `moves.Moves` is the real thing."""

    def want(self, choice: Choice, source: Source) -> None:
        """Look for a place elsewhere; the choice runs on meanwhile."""
        ...

    def stayed(self, choice: Choice, transfer_id: TransferId) -> None: ...

    def handed_off(self, choice: Choice) -> bool:
        """Pushed elsewhere and forgotten. False: nobody was to get it."""
        ...


class Source(Protocol):
    """An attempt as one that a running choice can be taken from."""

    @property
    def record(self) -> WorkerRecord:
        """Of the worker on which it runs."""
        ...

    def migrate(self, choice: Choice, to_attempt: Attempt, num_tokens: int, handoff: Handoff) -> None:
        """Tell that worker where to push it."""
        ...

    def let_go(self, choice: Choice) -> None:
        """It runs elsewhere now."""
        ...

    def lose(self, choice: Choice, loss: Loss) -> None: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything an attempt needs beside its workers. `start` is a LOCAL Start; relay derives its two from it."""

    start: Start
    deliver: Deliver
    timeout_ms: Callable[[], int]
    num_blocks: int
    """With the growth allowance: what decode is expected to take."""
    num_prefill_blocks: int


class LocalAttempt:
    """One worker does it all; also the way of a single token, which prefill can give alone."""

    def __init__(self, plan: Plan, owner: AttemptOwner, link: LinkPort) -> None:
        self.number: Attempt = plan.start.attempt
        self.open: set[Choice] = set(plan.start.choices)
        self._owner = owner
        self._plan = plan
        self._leg = WorkerLeg(link, plan.start)

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return (self._leg.worker_id,)

    @property
    def record(self) -> WorkerRecord:
        return self._leg.record

    def migrate(self, choice: Choice, to_attempt: Attempt, num_tokens: int, handoff: Handoff) -> None:
        self._leg.migrate(choice, to_attempt, num_tokens, handoff)

    def let_go(self, choice: Choice) -> None:
        self.open.discard(choice)
        self._leg.cancel_choice(choice)

    def lose(self, choice: Choice, loss: Loss) -> None:
        self._lose({choice}, loss)

    def begin(self) -> None:
        self._owner.moments.on_issued()
        self._leg.begin(self._plan.deliver, self._plan.num_blocks)

    def cancel(self) -> None:
        self.open.clear()
        self._leg.cancel()

    def on_signal(self, signal: LegSignal) -> None:
        if isinstance(signal, Lost):
            self._leg.gone()
            self._lose(self.open, Loss("link", signal.why, self.workers))
            return
        event = signal.event
        choice = event.key.choice
        match event:
            case Refused():
                self._leg.gone()
                refuse(self._owner, self.open, signal)
            case FirstToken():
                self._owner.moments.on_first_token(event)
                self._owner.cached(event.num_cached_tokens)
                self._accept(choice, event.index, (event.token,))
            case Tokens():
                self._owner.moments.on_tokens()
                self._accept(choice, event.first_index, event.tokens)
            case Finished():
                self._leg.ended(choice)
                finish(self._owner, self.open, event)
            case Failed():
                self._leg.ended(choice)
                if choice in self.open:
                    self._lose({choice}, loss_of(event, *self.workers))
            case Leaving():
                if choice in self.open:
                    self._owner.moves.want(choice, self)
            case Stayed():
                self._owner.moves.stayed(choice, event.transfer_id)
            case _:
                self._lose({choice}, unexpected(event, self.workers))

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
        self._leg.cancel_choice(choice)

    def _lose(self, choices: set[Choice], loss: Loss) -> None:
        lost = sorted(choices & self.open)
        self.open.difference_update(lost)
        for choice in lost:
            self._leg.cancel_choice(choice)
        if lost:
            self._owner.lost(lost, loss)


def finish(owner: AttemptOwner, open_choices: set[Choice], finished: Finished) -> None:
    """The last word of the worker that runs the choice. Where it has handed it over, somebody else goes on."""
    if finished.key.choice not in open_choices:
        return
    open_choices.discard(finished.key.choice)
    if finished.reason is not FinishReason.HANDED_OFF:
        owner.finish(finished.key.choice, finished.reason)
    elif not owner.moves.handed_off(finished.key.choice):
        owner.lost([finished.key.choice], Loss("protocol", "handed over to nobody", ()))


def refuse(owner: AttemptOwner, open_choices: set[Choice], signal: Arrival) -> None:
    if not isinstance(signal.event, Refused):
        raise TypeError(f"not a refusal: {signal.event}")
    if signal.event.reason is RefuseReason.BAD_START:
        raise Broken(f"worker {signal.worker_id} did not understand the request: {signal.event.message}")
    choices = sorted(open_choices)
    open_choices.clear()
    if choices:
        owner.refused(choices, signal.worker_id, signal.event)


def unexpected(event: Event, workers: tuple[WorkerId, ...]) -> Loss:
    return Loss("protocol", f"{type(event).__name__} has no place here", workers)
