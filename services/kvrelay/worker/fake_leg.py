"""One `Start` as a fake worker plays it, the tokens it makes up, and the fabric over which fakes hand over."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvrelay.core.kv import blocks_for
from kvrelay.core.request import GREEDY_BELOW
from kvrelay.pb import common_pb2, worker_pb2

if TYPE_CHECKING:
    from kvrelay.worker.fakes import FakeWorker

NextToken = Callable[[Sequence[int], int, int], int]
"""(tokens so far, output index, draw) → token. `draw` is 0 for greedy, else a number made of seed, choice, index."""


def letters(history: Sequence[int], index: int, draw: int) -> int:
    """A lower-case letter that depends on every token before it."""
    digest = zlib.crc32(struct.pack(f"<{len(history)}I", *history) + struct.pack("<Iq", index, draw))
    return 97 + digest % 26


def _draw(sampling: common_pb2.Sampling, choice: int, index: int) -> int:
    if sampling.temperature <= GREEDY_BELOW:
        return 0
    return zlib.crc32(struct.pack("<qII", sampling.seed, choice, index)) + 1


def expected_tokens(prompt: Sequence[int], num_tokens: int, next_token: NextToken = letters) -> list[int]:
    """What a greedy request with no stop gives on any fake, undisturbed."""
    history = list(prompt)
    for index in range(num_tokens):
        history.append(next_token(history, index, 0))
    return history[len(prompt) :]


@dataclass
class FakeFabric:
    """Where handoffs meet. A transfer id accepts one push, ever."""

    waiting: dict[str, asyncio.Future[dict[int, int]]] = field(default_factory=dict)
    num_pushes: int = 0

    def expect(self, transfer_id: str) -> asyncio.Future[dict[int, int]]:
        """The future gets {choice: first token} at commit, or fails with ConnectionError."""
        future: asyncio.Future[dict[int, int]] = asyncio.get_running_loop().create_future()
        self.waiting[transfer_id] = future
        return future

    def push(self, transfer_id: str, tokens: dict[int, int] | None) -> bool:
        """None is a push that broke. True: the receiver has committed."""
        self.num_pushes += 1
        future = self.waiting.pop(transfer_id, None)
        if future is None or future.done():
            return False
        if tokens is None:
            future.set_exception(ConnectionError("the push ended without a commit"))
            return False
        future.set_result(tokens)
        return True


@dataclass(eq=False)
class FakeLink:
    """One Attach stream: what is still to be written, and the legs it carries."""

    events: list[worker_pb2.Event] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    legs: dict[tuple[str, int], list[FakeLeg]] = field(default_factory=dict)
    closed: bool = False

    def emit(self, event: worker_pb2.Event) -> None:
        if not self.closed:
            self.events.append(event)
            self.wake.set()


class FakeLeg:
    """One Start being played by a task of its own."""

    def __init__(self, worker: FakeWorker, link: FakeLink, start: worker_pb2.Start) -> None:
        self._worker = worker
        self._link = link
        self._start = start
        self._history = {choice: list(start.token_ids) for choice in start.choices}
        self.open = list(start.choices)
        self.num_blocks = blocks_for(len(start.token_ids), worker.block_size) + len(start.choices)
        self.task = asyncio.create_task(self._play(), name=f"leg {start.request_id}")
        self.task.add_done_callback(lambda _: worker.forget(link, start, self))

    def cancel(self, choices: Sequence[int]) -> None:
        for choice in list(choices) or list(self.open):
            if choice in self.open:
                self.fail(choice, "cancelled", "cancelled by the router")
        if not self.open:
            self.task.cancel()

    async def _play(self) -> None:
        if refusal := self._worker.refusal_for(self._start, self.num_blocks):
            for choice in list(self.open):
                self._end(choice, refused=refusal)
            return
        self._worker.num_held += self.num_blocks
        try:
            await self._run_leg()
        finally:
            self._worker.num_held -= self.num_blocks

    async def _run_leg(self) -> None:
        if self._start.leg == worker_pb2.LEG_RECEIVE:
            if not await self._receive():
                return
        else:
            await self._worker.step()
            self._first_tokens()
            if self._start.leg == worker_pb2.LEG_SEND:
                await self._send()
                return
        while self.open:
            await self._worker.step()
            for choice in list(self.open):
                index, token = self._grow(choice)
                self._emit(choice, tokens=worker_pb2.Tokens(first_index=index, tokens=self._column([token])))
                self._maybe_finish(choice, index, token)

    async def _receive(self) -> bool:
        arrived = self._worker.fabric.expect(self._start.transfer_id)
        reserved = worker_pb2.Reserved(num_cached_tokens=0, receivers=[self._worker.receiver()])
        self._emit(self._start.choices[0], reserved=reserved)
        try:
            tokens = await arrived
        except ConnectionError as error:
            for choice in list(self.open):
                self.fail(choice, "transfer", str(error))
            return False
        for choice in list(self.open):
            if choice not in tokens:
                self.fail(choice, "cancelled", "ended with its first token at the sender")
                continue
            index = len(self._history[choice]) - self._start.num_prompt
            self._history[choice].append(tokens[choice])
            column = self._column([tokens[choice]])
            self._emit(choice, committed=worker_pb2.Committed(first_index=index, tokens=column))
        return True

    async def _send(self) -> None:
        """Push what goes on. `self.open` no longer holds the choices that ended with their first token."""
        await self._worker.step()
        tokens = {choice: self._history[choice][-1] for choice in self.open}
        broken = self._worker.take_transfer_failure()
        committed = self._worker.fabric.push(self._start.transfer_id, None if broken or not tokens else tokens)
        for choice in list(self.open):
            if committed:
                self._end(choice, finished=worker_pb2.Finished(reason="handed_off"))
            else:
                self.fail(choice, "transfer", "the push broke")

    def _first_tokens(self) -> None:
        for choice in list(self.open):
            index, token = self._grow(choice)
            first = worker_pb2.FirstToken(index=index, token=self._column([token]), queue_ms=1.0, prefill_ms=2.0)
            self._emit(choice, first_token=first)
            self._maybe_finish(choice, index, token)

    def _grow(self, choice: int) -> tuple[int, int]:
        history = self._history[choice]
        index = len(history) - self._start.num_prompt
        token = self._worker.next_token(history, index, _draw(self._start.sampling, choice, index))
        history.append(token)
        return index, token

    def _maybe_finish(self, choice: int, index: int, token: int) -> None:
        sampling = self._start.sampling
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= self._worker.eos_token_ids
        if token in stops and index >= sampling.min_tokens:
            self._end(choice, finished=worker_pb2.Finished(reason="stop"))
        elif index + 1 >= sampling.max_tokens or len(self._history[choice]) >= self._worker.max_context:
            self._end(choice, finished=worker_pb2.Finished(reason="length"))

    def _column(self, ids: list[int]) -> common_pb2.TokenColumn:
        if not self._start.sampling.HasField("logprobs"):
            return common_pb2.TokenColumn(ids=ids)
        width = self._start.sampling.logprobs
        top_ids = [token + rank for token in ids for rank in range(width)]
        top_logprobs = [-0.5 - rank for _ in ids for rank in range(width)]
        return common_pb2.TokenColumn(
            ids=ids, logprobs=[-0.5] * len(ids), top_width=width, top_ids=top_ids, top_logprobs=top_logprobs
        )

    def fail(self, choice: int, reason: str, message: str) -> None:
        self._end(choice, failed=worker_pb2.Failed(reason=reason, message=message))

    def _end(self, choice: int, **kind: Any) -> None:
        self.open.remove(choice)
        self._emit(choice, **kind)

    def _emit(self, choice: int, **kind: Any) -> None:
        start = self._start
        self._link.emit(
            worker_pb2.Event(request_id=start.request_id, choice=choice, attempt=start.attempt, **kind)
        )
