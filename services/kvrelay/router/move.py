"""One choice on its way from a worker that goes down to another one: an attempt that begins as another's shadow.

    RESERVING ─Reserved─▶ MOVING (the source is told) ─Committed─▶ RUNNING, as any attempt ─Finished─▶ over
        │                   │   └─source: handed off─▶ ARRIVING ─Committed─▶ RUNNING
        │                   │                              └─ failed, lost: the choice is lost (replay)
        │                   └─ failed, lost ─▶ BROKEN ─source: stayed─▶ over, the source goes on
        │                                         └─source: handed off, or silent: the choice is lost (replay)
        └─ refused, failed, lost ─▶ over, the source goes on

Until `Committed` the choice is the source's: its tokens, its end and its loss are what count, and each ends the move.
From `Committed` on nothing that the source says matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Protocol

from kvrelay.core.errors import Broken
from kvrelay.core.events import (
    Committed,
    Event,
    Failed,
    Finished,
    FirstToken,
    Leaving,
    Refused,
    Reserved,
    Stayed,
    Token,
    Tokens,
)
from kvrelay.core.handoff import Handoff
from kvrelay.core.ids import Attempt, Choice, TransferId, WorkerId
from kvrelay.core.placement import WorkerRecord
from kvrelay.core.request import Leg
from kvrelay.router.attempt import AttemptOwner, Plan, Source, finish, unexpected
from kvrelay.router.leg import WorkerLeg
from kvrelay.router.link_port import Arrival, LegSignal, LinkPort, Lost
from kvrelay.router.replay import Loss, loss_of
from kvrelay.router.token_log import ProtocolError


class Stage(Enum):
    RESERVING = "reserving"
    MOVING = "moving"
    ARRIVING = "arriving"
    BROKEN = "broken"
    RUNNING = "running"
    OVER = "over"


_MOVES = {
    Stage.RESERVING: {Stage.MOVING, Stage.OVER},
    Stage.MOVING: {Stage.ARRIVING, Stage.BROKEN, Stage.RUNNING, Stage.OVER},
    Stage.ARRIVING: {Stage.RUNNING, Stage.OVER},
    Stage.BROKEN: {Stage.OVER},
    Stage.RUNNING: {Stage.OVER},
    Stage.OVER: {Stage.OVER},
}


class MoveWatch(Protocol):
    """Who wanted it moved; `moves.Moves`."""

    def moved(self, move: MoveAttempt) -> None:
        """It runs there now."""
        ...

    def not_moved(self, move: MoveAttempt) -> None:
        """It came to nothing; the source goes on."""
        ...

    def broken(self, move: MoveAttempt) -> None:
        """The receiver is gone while the source was pushing: what became of the choice is for the source to say."""
        ...


class MoveAttempt:
    """Belongs to the coordinator of its request."""

    def __init__(
        self, plan: Plan, owner: AttemptOwner, watch: MoveWatch, target: LinkPort, source: Source,
        transfer_id: TransferId,
    ) -> None:
        self.number: Attempt = plan.start.attempt
        [self.choice] = plan.start.choices
        self.open: set[Choice] = {self.choice}
        self.transfer_id = transfer_id
        self._stage = Stage.RESERVING
        self._plan = plan
        self._owner = owner
        self._watch = watch
        self._source = source
        self._target = target
        self._leg = WorkerLeg(target, replace(plan.start, leg=Leg.RECEIVE, transfer_id=transfer_id))

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return (self._leg.worker_id,)

    @property
    def record(self) -> WorkerRecord:
        return self._target.record

    def begin(self) -> None:
        self._leg.begin(self._plan.deliver, self._plan.num_blocks)

    def cancel(self) -> None:
        self._end()
        self._leg.cancel()

    def on_signal(self, signal: LegSignal) -> None:
        if not self.open:
            return
        if isinstance(signal, Lost):
            self._leg.gone()
            self._fail(Loss("link", signal.why, self.workers))
        elif self._stage is Stage.RUNNING:
            self._on_running(signal.event)
        else:
            self._on_the_way(signal)

    # What the coordinator passes on from the source.

    def handed_off(self) -> None:
        """The source has pushed everything and forgotten the choice."""
        if self._stage is Stage.MOVING:
            self._go(Stage.ARRIVING)
        else:
            self._lose(Loss("transfer", "handed over, but the receiver is gone", self.workers))

    def stayed(self) -> None:
        self.cancel()
        self._watch.not_moved(self)

    def give_up(self, loss: Loss) -> None:
        """Nothing is heard of it: the source is told to drop the choice."""
        self.cancel()
        self._source.lose(self.choice, loss)

    # Being a source oneself, later.

    def migrate(self, choice: Choice, to_attempt: Attempt, num_tokens: int, handoff: Handoff) -> None:
        self._leg.migrate(choice, to_attempt, num_tokens, handoff)

    def let_go(self, choice: Choice) -> None:
        self.cancel()

    def lose(self, choice: Choice, loss: Loss) -> None:
        self._lose(loss)

    # Inside.

    def _on_the_way(self, signal: Arrival) -> None:
        event = signal.event
        match event:
            case Reserved() if self._stage is Stage.RESERVING:
                self._go(Stage.MOVING)
                handoff = Handoff(self.transfer_id, signal.receivers, event.num_cached_tokens)
                self._source.migrate(self.choice, self.number, self._plan.start.num_tokens, handoff)
            case Committed() if self._stage in (Stage.MOVING, Stage.ARRIVING):
                self._go(Stage.RUNNING)
                self._source.let_go(self.choice)
                self._watch.moved(self)
                self._accept(event.first_index, event.tokens)
            case Refused():
                self._leg.gone()
                self._fail(Loss("refused", event.message, self.workers))
            case Finished():
                self._leg.ended(self.choice)
                self._fail(Loss("protocol", "finished before it began", self.workers))
            case Failed():
                self._leg.ended(self.choice)
                self._fail(Loss(event.reason.value, event.message, self.workers))
            case _:
                self._fail(unexpected(event, self.workers))

    def _on_running(self, event: Event) -> None:
        match event:
            case Tokens():
                self._accept(event.first_index, event.tokens)
            case Finished():
                self._leg.ended(self.choice)
                finish(self._owner, self.open, event)
            case Failed():
                self._leg.ended(self.choice)
                self._lose(loss_of(event, *self.workers))
            case Leaving():
                self._owner.moves.want(self.choice, self)
            case Stayed():
                self._owner.moves.stayed(self.choice, event.transfer_id)
            case Reserved() | Committed() | Refused() | FirstToken():
                self._lose(unexpected(event, self.workers))

    def _accept(self, first_index: int, tokens: Sequence[Token]) -> None:
        try:
            if self._owner.accept(self.choice, first_index, tokens):
                return
        except ProtocolError as error:
            self._lose(Loss("protocol", str(error), self.workers))
            return
        self.cancel()

    def _fail(self, loss: Loss) -> None:
        match self._stage:
            case Stage.RESERVING:
                self.cancel()
                self._watch.not_moved(self)
            case Stage.MOVING:
                self._go(Stage.BROKEN)
                self._watch.broken(self)
            case Stage.ARRIVING | Stage.RUNNING:
                self._lose(loss)
            case Stage.BROKEN | Stage.OVER:
                pass

    def _lose(self, loss: Loss) -> None:
        self.cancel()
        self._owner.lost([self.choice], loss)

    def _end(self) -> None:
        self._go(Stage.OVER)
        self.open.clear()

    def _go(self, stage: Stage) -> None:
        if stage not in _MOVES[self._stage]:
            raise Broken(f"a move cannot go from {self._stage.value} to {stage.value}")
        self._stage = stage
