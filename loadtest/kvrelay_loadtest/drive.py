"""Sends a schedule of visits to a target, each at its time, and writes down what happened.

    visit: turn 0 at its scheduled time ─▶ answer ─▶ think ─▶ turn 1 ─▶ ...      (a visit of one turn is a request)

Visits never wait for each other. A later turn is scheduled `think_s` after the answer before it: that is when its user
speaks, and its latency counts from there. A run is bounded: what is unfinished at `limit_s` ends as `cut_off`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from kvrelay_loadtest.record import Record
from kvrelay_loadtest.targets import Ask, Piece, Target, TargetFailed


@dataclass(frozen=True, slots=True)
class Turn:
    text: str
    """What is new in this turn; earlier turns and answers go before it."""
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Visit:
    at_s: float
    turns: tuple[Turn, ...]
    session_id: str = ""


@dataclass(frozen=True, slots=True)
class Driver:
    target: Target
    think_s: float = 0.0
    limit_s: float = 600.0
    ignore_eos: bool = True
    on_end: Callable[[], None] = lambda: None

    async def run(self, visits: Sequence[Visit]) -> list[Record]:
        """Records in order of the schedule; turns that were never reached have none."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        logs: list[list[Record]] = [[] for _ in visits]
        tasks = [
            asyncio.create_task(self._visit(visit, start, log)) for visit, log in zip(visits, logs, strict=True)
        ]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self.limit_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for task in tasks:
                if not task.cancelled() and (error := task.exception()) is not None:
                    raise error
        return [record for log in logs for record in log]

    async def _visit(self, visit: Visit, start: float, log: list[Record]) -> None:
        loop = asyncio.get_running_loop()
        scheduled_s, history = visit.at_s, ""
        for number, turn in enumerate(visit.turns):
            record = Record(scheduled_s, turn=number)
            await asyncio.sleep(start + scheduled_s - loop.time())
            log.append(record)
            record.sent_s = loop.time() - start
            prompt = history + turn.text
            ask = Ask(prompt, turn.max_tokens, visit.session_id, self.ignore_eos)
            answer = await self._ask(ask, record, start)
            self.on_end()
            if record.error:
                return
            history = prompt + answer
            scheduled_s = record.end_s + self.think_s

    async def _ask(self, ask: Ask, record: Record, start: float) -> str:
        loop = asyncio.get_running_loop()
        texts: list[str] = []
        num_tokens = 0
        try:
            async for piece in self.target.stream(ask):
                if piece.usage is not None:
                    record.num_prompt, record.num_output = piece.usage
                if piece.text or piece.num_tokens:
                    record.pieces_s.append(loop.time() - start)
                    texts.append(piece.text)
                    num_tokens += piece.num_tokens
            if not record.pieces_s:
                record.error = "no_output"
        except TargetFailed as error:
            record.error = error.kind
        except asyncio.CancelledError:
            record.error = "cut_off"
            raise
        finally:
            record.end_s = loop.time() - start
            record.num_output = record.num_output or num_tokens or len(record.pieces_s)
        return "".join(texts)


@dataclass(slots=True)
class FakeTarget:
    """Answers with `max_tokens` pieces, the first after `ttft_s`, the others `itl_s` apart. For tests of drivers."""

    ttft_s: float = 0.1
    itl_s: float = 0.01
    fail: str = ""
    """Kind of the failure that comes instead of the second piece."""
    asks: list[Ask] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0

    async def stream(self, ask: Ask) -> AsyncIterator[Piece]:
        self.asks.append(ask)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            for number in range(ask.max_tokens):
                if number and self.fail:
                    raise TargetFailed(self.fail)
                await asyncio.sleep(self.itl_s if number else self.ttft_s)
                yield Piece(" x")
            yield Piece(usage=(len(ask.prompt.split()), ask.max_tokens))
        finally:
            self.num_open -= 1

    async def close(self) -> None: ...
