"""One request, from admission to the summary: one task that owns its token logs, attempts, deadline and usage.

    hints ─▶ ask ─▶ your turn ─▶ place() ─▶ attempt ─events─▶ answers ─▶ delivery
              ▲                    │ not now: wait           │
              ├── refused: same rank in the queue ───────────┤
              └── lost: one ask per unfinished choice ───────┘   (all choices together while none has a token)

A choice whose worker goes down moves to another one while it runs (`moves`); the attempt that it is then is one more.

Everything that happens to the request comes as a signal and is handled here, one at a time: through the mailbox, or,
for the tokens of a running choice, in the call that brings them, so that a token wakes nobody but the client's writer.
However the task ends, its legs are cancelled and its tickets handed back before it is over.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrelay.core.config import Config, PlacementSettings
from kvrelay.core.errors import BadRequest, Broken, DeadlineExceeded, KvrelayError, Unavailable
from kvrelay.core.events import FinishReason, Refused, RefuseReason, Token, Tokens
from kvrelay.core.ids import Attempt, BlockHash, Choice, TransferId, WorkerId
from kvrelay.core.kv import blocks_for
from kvrelay.core.output import GenerateRequest, Output, Started
from kvrelay.core.placement import Hints, Mode, Placement, PlacementRequest, Snapshot
from kvrelay.core.request import Leg, Start
from kvrelay.observe.metrics import RouterMetrics
from kvrelay.router.admission import Ticket, WaitingRoom
from kvrelay.router.asking import (
    MIN_TO_MOVE,
    Ask,
    Need,
    check_fits,
    placement_request,
    targets,
    waited_too_long,
    worker_ids,
)
from kvrelay.router.attempt import LocalAttempt, Plan, Source
from kvrelay.router.delivery import Delivery
from kvrelay.router.link_port import Arrival, FleetPort, LegSignal, Lost
from kvrelay.router.mailbox import Mailbox
from kvrelay.router.move import MoveAttempt
from kvrelay.router.moves import Moves, MoveTimer
from kvrelay.router.output_stage import Answer, Text
from kvrelay.router.relay import RelayAttempt
from kvrelay.router.replay import Loss, check_attempts, start_groups
from kvrelay.router.request_log import CANCELLED, OK, Ending, ending_of
from kvrelay.router.session import SessionBook, block_hashes, cache_salt
from kvrelay.router.signals import Signal, StopMet, WaitOver, YourTurn
from kvrelay.router.tally import Tally
from kvrelay.router.timing import Moments

RequestAttempt = LocalAttempt | RelayAttempt | MoveAttempt
Place = Callable[[PlacementRequest, Snapshot, Hints, PlacementSettings], Placement | None]


@dataclass(frozen=True, slots=True)
class Kitchen:
    """What all requests of a router share."""

    config: Config
    fleet: FleetPort
    room: WaitingRoom
    sessions: SessionBook
    metrics: RouterMetrics
    place: Place
    new_text: Callable[[GenerateRequest], Text]
    stopwatch: Callable[[], float]
    """Seconds, for what is measured and told. Waits and deadlines go by the event loop's own time."""


class Coordinator:
    def __init__(self, request: GenerateRequest, kitchen: Kitchen, delivery: Delivery) -> None:
        self._request = request
        self._kitchen = kitchen
        self._delivery = delivery
        self._loop = asyncio.get_running_loop()
        settings = kitchen.config.router
        self._timeout_s = min(request.timeout_s, settings.deadline_s)
        self._deadline = self._loop.time() + self._timeout_s
        self._mailbox: Mailbox[Signal] = Mailbox(settings.max_delta_queue)
        stop_ids = request.sampling.stop_token_ids
        self._answers = [
            Answer(Choice(i), kitchen.new_text(request), request.resume, stop_ids, request.resume_chars)
            for i in range(request.n)
        ]
        self._tally = Tally(request, self._answers, kitchen.metrics, kitchen.stopwatch)
        self._num_starts = 0
        """Numbers the attempts; moves are numbered too, but they are nobody's second try."""
        self.moves = Moves(self._begin_move, self._tally.moved, self._mailbox.put, kitchen.config.link)
        self._attempts: dict[Attempt, RequestAttempt] = {}
        self._asks: dict[Attempt, Ask] = {}
        """Which ask an attempt came from: if it is refused, the ask keeps its rank."""
        self._waiting: dict[Ask, asyncio.TimerHandle | None] = {}
        self._excluded: set[WorkerId] = set()
        self._hints = Hints()
        self._hashes: tuple[BlockHash, ...] = ()
        self._started = False
        self._waits_since = self._loop.time()
        self._admitted = bool(request.resume)
        """A worker has taken it once, so it is a stream that goes on: it goes ahead of new work."""

    @property
    def moments(self) -> Moments:
        return self._tally.moments

    async def run(self) -> None:
        """Ends the delivery whatever happens. Only cancellation and bugs come out of here."""
        ending = Ending("broken", Broken("the request ended unexpectedly; the router's log has the details"))
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._work()
            ending = OK
        except TimeoutError:
            error = DeadlineExceeded(f"not finished within {self._timeout_s:g} s")
            ending = ending_of(error)
        except KvrelayError as error:
            ending = ending_of(error)
        except asyncio.CancelledError:
            ending = CANCELLED
            self._delivery.end(Unavailable("this router is going down; send the request to another one"))
            raise
        finally:
            self._release()
            self._delivery.end(ending.error)
            self._tally.close(ending)

    async def _work(self) -> None:
        if self._answer_without_workers():
            return
        await self._look_up_hints()
        self._ask(tuple(answer.choice for answer in self._answers))
        while not all(answer.is_done for answer in self._answers):
            self._on_signal(await self._mailbox.get())
        self.moments.on_finished()
        self._emit(self._tally.summary())
        self._kitchen.sessions.remember(self._request, self._hints, self._tally.workers, self._answers[0].log.ids)

    def _answer_without_workers(self) -> bool:
        """`max_tokens: 0`, or a resuming caller whose text has met a stop string. Whether its last token was an end of
        sequence only a worker can say."""
        for answer in self._answers:
            for output in answer.resume():
                self._emit(output)
            if self._request.sampling.max_tokens == 0:
                for output in answer.finish(FinishReason.LENGTH):
                    self._emit(output)
        if not all(answer.is_done for answer in self._answers):
            return False
        self._emit(self._tally.summary())
        return True

    async def _look_up_hints(self) -> None:
        snapshot = self._kitchen.fleet.snapshot()
        record = next((view.record for view in snapshot.workers if view.record.role.can_decode), None)
        if record is not None:
            check_fits(self._request, snapshot)
            self._hashes = block_hashes(record, self._request.tenant, self._request.prompt_ids)
        self._hints = await self._kitchen.sessions.hints(self._request, self._hashes)

    # Signals.

    def _deliver(self, signal: LegSignal) -> None:
        """Called by the links. While the task rests, tokens are dealt with at once, in the links' own task; what goes
        wrong is this one's to raise, so it ends this request and no other stream of that link."""
        if isinstance(signal, Arrival) and isinstance(signal.event, Tokens) and self._mailbox.is_empty:
            with self._mailbox.errors:
                self._on_leg(signal)
        else:
            self._mailbox.put(signal)

    def _on_signal(self, signal: Signal) -> None:
        match signal:
            case YourTurn(ask):
                self._try_to_place(ask)
            case WaitOver(ask):
                if ask in self._waiting:
                    raise waited_too_long(ask, self._kitchen.fleet.snapshot(), self._tally.waited_s)
            case MoveTimer():
                self.moves.on_timer(signal)
            case Arrival() | Lost():
                self._on_leg(signal)
            case StopMet():
                pass

    def _on_leg(self, signal: LegSignal) -> None:
        attempt = self._attempts.get(signal.attempt)
        if attempt is not None:
            attempt.on_signal(signal)
            if not attempt.open:
                self._attempts.pop(attempt.number, None)
                self._asks.pop(attempt.number, None)

    # Asking for a place.

    def _ask(self, choices: tuple[Choice, ...]) -> None:
        ticket = Ticket.new(
            replay=self._admitted, priority=self._request.priority, your_turn=lambda: self._mailbox.put(YourTurn(ask))
        )
        ask = Ask(ticket, choices, self._admitted)
        self._wait(ask)

    def _wait(self, ask: Ask) -> None:
        """New work waits for a bounded time, counted from its arrival or its last loss; a replay for the deadline."""
        self._waiting[ask] = None
        if not ask.replay:
            until = self._waits_since + self._kitchen.config.router.max_waiting_s
            self._waiting[ask] = self._loop.call_at(until, self._mailbox.put, WaitOver(ask))
        self._kitchen.room.enter(ask.ticket)

    def _stop_waiting(self, ask: Ask) -> None:
        timer = self._waiting.pop(ask)
        if timer is not None:
            timer.cancel()
        self._kitchen.room.leave(ask.ticket)

    def _try_to_place(self, ask: Ask) -> None:
        if ask not in self._waiting:
            return
        snapshot = self._kitchen.fleet.snapshot()
        if not ask.replay:
            check_fits(self._request, snapshot)
        held = ask.held_now(self._loop.time())
        wanted = placement_request(
            self._need(ask), snapshot, self._kitchen.config, self._hashes, frozenset(self._excluded) | held, ask.replay,
            self._tally.numerics,
        )
        placement = self._kitchen.place(wanted, snapshot, self._hints, self._kitchen.config.placement)
        if placement is None or worker_ids(placement) & held or not self._begin(ask, placement, wanted.num_blocks):
            self._kitchen.room.not_now(ask.ticket)
            return
        self._stop_waiting(ask)

    def _need(self, ask: Ask) -> Need:
        next_index = self._answers[ask.choices[0]].log.next_index
        remaining = self._request.sampling.max_tokens - next_index
        num_tokens = len(self._request.prompt_ids) + next_index
        return Need(num_tokens, len(ask.choices), remaining, not self._request.open_ended)

    # Attempts.

    def _begin(self, ask: Ask, placement: Placement, num_blocks: int) -> bool:
        """False when a chosen worker has left in this moment."""
        attempt = self._new_attempt(self._plan(ask.choices, num_blocks, replay=ask.replay), placement)
        if attempt is None:
            return False
        self._attempts[attempt.number], self._asks[attempt.number] = attempt, ask
        for choice in ask.choices:
            self._answers[choice].num_attempts += 1
        self._tally.placed(placement)
        attempt.begin()
        return True

    def _plan(self, choices: tuple[Choice, ...], num_blocks: int, *, replay: bool) -> Plan:
        log = self._answers[choices[0]].log
        request, number = self._request, Attempt(self._num_starts)
        self._num_starts += 1
        start = Start(
            request_id=request.request_id,
            attempt=number,
            choices=choices,
            token_ids=(*request.prompt_ids, *log.ids),
            num_prompt=len(request.prompt_ids),
            sampling=request.sampling,
            leg=Leg.LOCAL,
            cache_salt=cache_salt(request.tenant),
            priority=request.priority,
            replay=replay,
            timeout_ms=self._timeout_ms(),
        )
        num_prefill_blocks = blocks_for(start.num_tokens, self._kitchen.config.engine.block_size)
        return Plan(start, self._deliver, self._timeout_ms, num_blocks, num_prefill_blocks)

    def _begin_move(self, choice: Choice, source: Source, avoid: frozenset[WorkerId]) -> MoveAttempt | None:
        """Not begun yet. None: there is no room elsewhere now, or not enough left to move for."""
        snapshot = targets(source.record, avoid, self._kitchen.fleet.snapshot())
        log, sampling = self._answers[choice].log, self._request.sampling
        num_remaining, is_promised = sampling.max_tokens - log.next_index, not self._request.open_ended
        need = Need(len(self._request.prompt_ids) + log.next_index, 1, num_remaining, is_promised)
        if need.num_remaining < MIN_TO_MOVE or not snapshot.workers:
            return None
        wanted = placement_request(
            need, snapshot, self._kitchen.config, self._hashes, frozenset(), False, source.record.numerics
        )
        placement = self._kitchen.place(wanted, snapshot, self._hints, self._kitchen.config.placement)
        decode = placement.decode if placement is not None else None
        link = self._kitchen.fleet.link(decode.worker_id) if decode is not None else None
        if link is None:
            return None
        plan = self._plan((choice,), wanted.num_blocks, replay=True)
        move = MoveAttempt(plan, self, self.moves, link, source, self._transfer_id(plan.start))
        self._attempts[move.number] = move
        return move

    @staticmethod
    def _transfer_id(start: Start) -> TransferId:
        return TransferId(f"{start.request_id}.{start.attempt}.{uuid.uuid4().hex[:12]}")

    def _new_attempt(self, plan: Plan, placement: Placement) -> LocalAttempt | RelayAttempt | None:
        link = self._kitchen.fleet.link
        prefill = link(placement.prefill.worker_id) if placement.prefill is not None else None
        decode = link(placement.decode.worker_id) if placement.decode is not None else None
        if placement.mode is Mode.RELAY and placement.decode is not None:
            if prefill is None or decode is None:
                return None
            return RelayAttempt(plan, self, prefill, decode, self._transfer_id(plan.start))
        alone = prefill if placement.mode is Mode.RELAY else decode
        return LocalAttempt(plan, self, alone) if alone is not None else None

    def _timeout_ms(self) -> int:
        return max(1, int((self._deadline - self._loop.time()) * 1e3))

    # What attempts tell (AttemptOwner).

    def accept(self, choice: Choice, first_index: int, tokens: Sequence[Token]) -> bool:
        answer = self._answers[choice]
        before = answer.log.next_index
        for output in answer.accept(first_index, tokens):
            self._emit(output)
        self._tally.tokens(choice, answer.log.next_index - before)
        if answer.is_done:
            self.moves.drop(choice)
            self._mailbox.put(StopMet())
        return not answer.is_done

    def cached(self, num_tokens: int) -> None:
        self._tally.cached(num_tokens)

    def finish(self, choice: Choice, reason: FinishReason) -> None:
        self.moves.drop(choice)
        for output in self._answers[choice].finish(reason):
            self._emit(output)

    def refused(self, choices: Sequence[Choice], worker_id: WorkerId, refusal: Refused) -> None:
        ask = self._asks[refusal.key.attempt]
        for choice in ask.choices:
            self._answers[choice].num_attempts -= 1
        if refusal.reason is RefuseReason.NEVER_FITS and not ask.replay:
            raise BadRequest(refusal.message, code="context_length_exceeded")
        if refusal.reason in (RefuseReason.NEVER_FITS, RefuseReason.DRAINING):
            self._excluded.add(worker_id)
        retry_after_s = max(refusal.retry_after_ms / 1e3, self._kitchen.config.link.beat_s)
        until = self._loop.time() + retry_after_s
        ask.hold_off(worker_id, until, retry_after_s)
        self._loop.call_at(until, self._kitchen.room.changed)
        if tuple(choices) == ask.choices:
            self._wait(ask)
        else:
            self._ask_again(choices)

    def lost(self, choices: Sequence[Choice], loss: Loss) -> None:
        for choice in choices:
            self.moves.drop(choice)
        answers = [self._answers[choice] for choice in choices]
        if loss.is_nobodys_fault:
            for answer in answers:
                answer.num_attempts -= 1
        check_attempts(answers, self._kitchen.config.router.max_attempts, loss)
        self._tally.replayed(loss.reason)
        self._waits_since = self._loop.time()
        self._excluded.update(loss.workers)
        self._ask_again(choices)

    def _ask_again(self, choices: Sequence[Choice]) -> None:
        self._admitted = self._admitted or self._started or self.moments.reserved is not None
        for group in start_groups([self._answers[choice] for choice in choices]):
            self._ask(group)

    # Output.

    def _emit(self, output: Output) -> None:
        if not self._started:
            self._started = True
            request = self._request
            self._delivery.put(Started(request.request_id, request.sampling.seed, len(request.prompt_ids)))
        self._delivery.put(output)

    # The end.

    def _release(self) -> None:
        self.moves.close()
        for attempt in self._attempts.values():
            attempt.cancel()
        self._attempts.clear()
        for ask in list(self._waiting):
            self._stop_waiting(ask)
