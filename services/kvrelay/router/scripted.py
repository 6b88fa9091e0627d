"""Workers without sockets, for stories about requests under virtual time. Ships beside the seam it stands in for.

    LOCAL    ─prefill_s─▶ FirstToken ─step_s─▶ Tokens … Finished
    RECEIVE  ─reserve_s─▶ Reserved … Committed ─step_s─▶ Tokens … Finished
    SEND     ─prefill_s─▶ FirstToken ─transfer_s─▶ (the receiver commits) Finished(handed_off)
    leave()  Leaving … Migrate ─transfer_s─▶ (the receiver commits) Finished(handed_off), or Stayed

The next token is a pure function of the tokens so far, so every worker continues every request alike and
`expected_ids` tells what an undisturbed run gives. Misfortunes are played by `die`, `refusals`, `failures`.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

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
    RefuseReason,
    Reserved,
    Stayed,
    Token,
    Tokens,
)
from kvrelay.core.handoff import KvIdentity, KvShard, Receiver
from kvrelay.core.ids import Attempt, Choice, Incarnation, RequestId, TokenId, WorkerId
from kvrelay.core.kv import blocks_for
from kvrelay.core.placement import Load, Role, Snapshot, WorkerRecord, WorkerView
from kvrelay.core.request import Leg, Migrate, SamplingParams, Start
from kvrelay.router.link_port import Arrival, Deliver, LinkPort, Lost

IDENTITY = KvIdentity("scripted", "none", "letters", 2, 2, 16, 16)
SHARD = KvShard(0, 2, 0, 2, "float32")

NextToken = Callable[[Sequence[TokenId], SamplingParams, Choice, int], TokenId]


def letters(history: Sequence[TokenId], sampling: SamplingParams, choice: Choice, index: int) -> TokenId:
    """A lower-case letter that depends on every token before it and, unless greedy, on seed, choice and index."""
    draw = 0 if sampling.is_greedy else zlib.crc32(struct.pack("<qII", sampling.seed, choice, index)) + 1
    packed = struct.pack(f"<{len(history)}I", *history) + struct.pack("<IQ", index, draw)
    return TokenId(97 + zlib.crc32(packed) % 26)


def expected_ids(
    prompt: Sequence[TokenId], sampling: SamplingParams, choice: int = 0, next_token: NextToken = letters
) -> tuple[TokenId, ...]:
    """All `max_tokens` tokens of an undisturbed run without an end of sequence."""
    history = list(prompt)
    for index in range(sampling.max_tokens):
        history.append(next_token(history, sampling, Choice(choice), index))
    return tuple(history[len(prompt) :])


@dataclass(frozen=True, slots=True)
class CancelCall:
    request_id: RequestId
    attempt: Attempt
    choices: tuple[Choice, ...]


@dataclass(eq=False)
class ScriptedFleet:
    """All workers of a story; `changed` is told whenever a placement may have become possible."""

    workers: dict[WorkerId, ScriptedWorker] = field(default_factory=dict)
    waiting_pushes: dict[str, ScriptedLeg] = field(default_factory=dict)
    changed: Callable[[], None] = lambda: None

    def add(self, worker_id: str, role: Role, **settings: float) -> ScriptedWorker:
        worker = ScriptedWorker(self, WorkerId(worker_id), role)
        for name, value in settings.items():
            setattr(worker, name, value)
        self.workers[worker.record.worker_id] = worker
        self.changed()
        return worker

    def snapshot(self) -> Snapshot:
        return Snapshot(tuple(WorkerView(each.record, each.load(), each.up) for each in self.workers.values()))

    def link(self, worker_id: WorkerId) -> LinkPort | None:
        return self.workers.get(worker_id)


class ScriptedWorker:
    """One worker and the link to it. All durations are virtual seconds and may be changed at any time."""

    def __init__(self, fleet: ScriptedFleet, worker_id: WorkerId, role: Role) -> None:
        self.fleet = fleet
        self.reserve_s = self.prefill_s = self.transfer_s = self.step_s = 1.0
        self.up = True
        self.draining = False
        self.next_token: NextToken = letters
        self.eos: TokenId | None = None
        self.num_cached = 0
        self.num_blocks = 64
        self.refusals: list[tuple[RefuseReason, int]] = []
        """(reason, retry_after_ms) for the next Starts."""
        self.failures: dict[int, FailReason] = {}
        """Output index at which a choice fails instead of drawing; each is used once."""
        self.line_s = 0.0
        """How long its events are under way."""
        self.break_pushes = 0
        """So many of the next pushes from here end without a commit."""
        self.starts: list[Start] = []
        self.cancels: list[CancelCall] = []
        self.legs: dict[tuple[RequestId, Attempt], ScriptedLeg] = {}
        self.under_way: deque[tuple[Arrival, ScriptedLeg]] = deque()
        """Events on a slow line, and whose they are. They arrive in order."""
        self._record = WorkerRecord(
            worker_id, Incarnation(f"{worker_id}-1"), role, "nowhere:1", "nowhere:2", "scripted", IDENTITY, SHARD,
            num_blocks=64, max_context=512,
        )

    @property
    def record(self) -> WorkerRecord:
        return self._record

    def resize(self, *, num_blocks: int, max_context: int) -> None:
        self.num_blocks = num_blocks
        self._record = replace(self._record, num_blocks=num_blocks, max_context=max_context)

    def load(self) -> Load:
        held = sum(leg.num_blocks for leg in self.legs.values())
        return Load(
            num_blocks=max(self.num_blocks, held), num_free=max(0, self.num_blocks - held), num_held=held,
            num_running=len(self.legs), prefill_tokens_per_s=1_000.0, draining=self.draining,
        )

    def start(self, start: Start, deliver: Deliver, num_blocks: int) -> None:
        if not self.up:
            deliver(Lost(self._record.worker_id, start.attempt, "the stream is down"))
            return
        self.starts.append(start)
        leg = ScriptedLeg(self, start, deliver)
        self.legs[(start.request_id, start.attempt)] = leg
        leg.task = asyncio.get_running_loop().create_task(leg.play())

    def cancel(self, request_id: RequestId, attempt: Attempt, choices: tuple[Choice, ...] = ()) -> None:
        self.cancels.append(CancelCall(request_id, attempt, choices))
        leg = self.legs.get((request_id, attempt))
        if leg is not None:
            leg.drop(choices or tuple(leg.open))

    def migrate(self, migrate: Migrate) -> None:
        key = migrate.key
        leg = self.legs.get((key.request_id, key.attempt))
        if leg is not None and key.choice in leg.open:
            leg.move(key.choice, migrate)

    def leave(self) -> None:
        """It goes down: everything that runs here would rather run elsewhere."""
        self.draining = True
        for leg in list(self.legs.values()):
            leg.ask_to_leave()

    def forget(self, request_id: RequestId, attempt: Attempt) -> None:
        leg = self.legs.get((request_id, attempt))
        if leg is not None:
            leg.forgotten = True

    def hand_over_next(self) -> None:
        if self.under_way:
            arrival, leg = self.under_way.popleft()
            leg.hand_over(arrival)

    def die(self) -> None:
        """The stream ends; everything it carried is gone."""
        self.up = False
        legs = {*self.legs.values(), *(leg for _, leg in self.under_way)}
        self.under_way.clear()
        for leg in sorted(legs, key=lambda leg: (leg.start.request_id, leg.start.attempt)):
            leg.end_now()
            leg.tell(Lost(self._record.worker_id, leg.start.attempt, "connection reset"))

    def revive(self) -> None:
        self.up = True
        self.fleet.changed()

    @property
    def is_empty(self) -> bool:
        return not self.legs and not any(leg.worker is self for leg in self.fleet.waiting_pushes.values())


class ScriptedLeg:
    def __init__(self, worker: ScriptedWorker, start: Start, deliver: Deliver) -> None:
        self.worker = worker
        self.start = start
        self.open = list(start.choices)
        self.forgotten = False
        self.num_blocks = blocks_for(start.num_tokens, 16) + len(start.choices)
        self.task: asyncio.Task[None] | None = None
        self.deliver = deliver
        self._committed = asyncio.Event()
        self._moving: dict[Choice, asyncio.Task[None]] = {}
        self._history = {choice: list(start.token_ids) for choice in start.choices}

    async def play(self) -> None:
        if self.worker.refusals:
            reason, retry_after_ms = self.worker.refusals.pop(0)
            self._emit(Refused(self.start.key(self.open[0]), reason, "told to", retry_after_ms))
            self.end_now()
            return
        if self.start.next_index and self._is_stop(self.start.token_ids[-1], self.start.next_index - 1):
            self._end(Finished(self.start.key(self.open[0]), FinishReason.STOP))
            return
        if self.start.next_index >= self.start.sampling.max_tokens:
            self._end(Finished(self.start.key(self.open[0]), FinishReason.LENGTH))
            return
        match self.start.leg:
            case Leg.LOCAL:
                await self._first_tokens()
                await self._run()
            case Leg.RECEIVE:
                await asyncio.sleep(self.worker.reserve_s)
                await self._receive()
            case Leg.SEND:
                await self._first_tokens()
                await self._send()

    def drop(self, choices: Sequence[Choice]) -> None:
        """Cancelled by the router: the worker confirms with its terminal event."""
        for choice in choices:
            self._end(Failed(self.start.key(choice), FailReason.CANCELLED, "cancelled"))

    def end_now(self) -> None:
        self.open.clear()
        self._leave()

    def tell(self, lost: Lost) -> None:
        if not self.forgotten:
            self.deliver(lost)

    def arrived(self, tokens: dict[Choice, Token]) -> None:
        for choice in list(self.open):
            if choice not in tokens:
                self._end(Failed(self.start.key(choice), FailReason.CANCELLED, "not in the commit"))
                continue
            index = self._append(choice, tokens[choice])
            self._emit(Committed(self.start.key(choice), index, (tokens[choice],)))
        self._committed.set()

    def ask_to_leave(self) -> None:
        for choice in self.open:
            if len(self._history[choice]) > self.start.num_prompt and self.start.leg is not Leg.SEND:
                self._emit(Leaving(self.start.key(choice)))

    def move(self, choice: Choice, migrate: Migrate) -> None:
        self._moving[choice] = asyncio.get_running_loop().create_task(self._move(choice, migrate))

    async def _move(self, choice: Choice, migrate: Migrate) -> None:
        """Draws on while the push lasts, and is frozen only for the commit."""
        await asyncio.sleep(self.worker.transfer_s)
        transfer_id = migrate.handoff.transfer_id
        receiver = self.worker.fleet.waiting_pushes.pop(transfer_id, None)
        del self._moving[choice]
        if choice not in self.open:
            return
        if self.worker.break_pushes > 0 or receiver is None or not receiver.open:
            self.worker.break_pushes = max(0, self.worker.break_pushes - 1)
            if receiver is not None:
                receiver.push_broke()
            self._emit(Stayed(self.start.key(choice), transfer_id, "the push broke"))
            return
        since = tuple(self._token(token_id) for token_id in self._history[choice][migrate.num_tokens :])
        receiver.moved_in(choice, since)
        self._end(Finished(self.start.key(choice), FinishReason.HANDED_OFF))

    def moved_in(self, choice: Choice, since: tuple[Token, ...]) -> None:
        first_index = len(self._history[choice]) - self.start.num_prompt
        self._history[choice].extend(token.token_id for token in since)
        self._emit(Committed(self.start.key(choice), first_index, since))
        self._committed.set()

    def push_broke(self) -> None:
        for choice in list(self.open):
            self._end(Failed(self.start.key(choice), FailReason.TRANSFER, "the push ended without a commit"))

    async def _receive(self) -> None:
        record = self.worker.record
        receiver = Receiver(record.worker_id, record.incarnation, record.push_address, record.shard)
        self.worker.fleet.waiting_pushes[self._transfer_id] = self
        self._emit(Reserved(self.start.key(self.open[0]), 0), (receiver,))
        await self._committed.wait()
        await self._run()

    async def _send(self) -> None:
        await asyncio.sleep(self.worker.transfer_s)
        receiver = self.worker.fleet.waiting_pushes.pop(self._transfer_id, None)
        tokens = {choice: Token(self._history[choice][-1]) for choice in self.open}
        if self.worker.break_pushes > 0 or receiver is None or not receiver.open:
            self.worker.break_pushes = max(0, self.worker.break_pushes - 1)
            if receiver is not None:
                receiver.push_broke()
            for choice in list(self.open):
                self._end(Failed(self.start.key(choice), FailReason.TRANSFER, "the push broke"))
            return
        receiver.arrived(tokens)
        for choice in list(self.open):
            self._end(Finished(self.start.key(choice), FinishReason.HANDED_OFF))

    async def _first_tokens(self) -> None:
        await asyncio.sleep(self.worker.prefill_s)
        for choice in list(self.open):
            token = self._draw(choice)
            if token is None:
                continue
            index = self._append(choice, token)
            prefill_ms = self.worker.prefill_s * 1e3
            self._emit(FirstToken(
                self.start.key(choice), index, token, self.worker.num_cached, 0.0, prefill_ms, prefill_ms / 2
            ))
            self._maybe_finish(choice, index, token)

    async def _run(self) -> None:
        while self.open:
            await asyncio.sleep(self.worker.step_s)
            for choice in list(self.open):
                token = self._draw(choice)
                if token is not None:
                    index = self._append(choice, token)
                    self._emit(Tokens(self.start.key(choice), index, (token,)))
                    self._maybe_finish(choice, index, token)

    def _draw(self, choice: Choice) -> Token | None:
        index = len(self._history[choice]) - self.start.num_prompt
        failure = self.worker.failures.pop(index, None)
        if failure is not None:
            self._end(Failed(self.start.key(choice), failure, "told to"))
            return None
        return self._token(self.worker.next_token(self._history[choice], self.start.sampling, choice, index))

    def _token(self, token_id: TokenId) -> Token:
        sampling = self.start.sampling
        if sampling.logprobs is None:
            return Token(token_id)
        top = tuple((TokenId(token_id + rank), -0.5 - rank) for rank in range(sampling.logprobs))
        return Token(token_id, -0.5, top)

    def _append(self, choice: Choice, token: Token) -> int:
        self._history[choice].append(token.token_id)
        return len(self._history[choice]) - self.start.num_prompt - 1

    def _maybe_finish(self, choice: Choice, index: int, token: Token) -> None:
        if self._is_stop(token.token_id, index):
            self._end(Finished(self.start.key(choice), FinishReason.STOP))
        elif index + 1 >= self.start.sampling.max_tokens:
            self._end(Finished(self.start.key(choice), FinishReason.LENGTH))

    def _is_stop(self, token_id: TokenId, index: int) -> bool:
        sampling = self.start.sampling
        is_eos = token_id == self.worker.eos and not sampling.ignore_eos
        return (is_eos or token_id in sampling.stop_token_ids) and index >= sampling.min_tokens

    def _end(self, event: Failed | Finished) -> None:
        if event.key.choice in self.open:
            self.open.remove(event.key.choice)
            self._emit(event)
        if not self.open:
            self._leave()

    def _emit(self, event: Event, receivers: tuple[Receiver, ...] = ()) -> None:
        arrival = Arrival(self.worker.record.worker_id, event, receivers)
        if self.worker.line_s:
            self.worker.under_way.append((arrival, self))
            asyncio.get_running_loop().call_later(self.worker.line_s, self.worker.hand_over_next)
        else:
            self.hand_over(arrival)

    def hand_over(self, arrival: Arrival) -> None:
        if not self.forgotten:
            self.deliver(arrival)

    def _leave(self) -> None:
        self.worker.legs.pop((self.start.request_id, self.start.attempt), None)
        if self._transfer_id:
            waiting = self.worker.fleet.waiting_pushes
            if waiting.get(self._transfer_id) is self:
                del waiting[self._transfer_id]
        for task in (self.task, *self._moving.values()):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        self.worker.fleet.changed()

    @property
    def _transfer_id(self) -> str:
        return self.start.transfer_id or ""
