"""A front door without a kitchen: deterministic answers, for tests of everything in front of the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from kvrelay.core.config import RouterSettings
from kvrelay.core.errors import KvrelayError
from kvrelay.core.events import Token
from kvrelay.core.ids import Choice, TokenId
from kvrelay.core.output import ChoiceFinished, Delta, GenerateRequest, Output, Started, Summary, Timing
from kvrelay.router.bell import Bell
from kvrelay.router.front import ModelCard, OpenRequest, Readiness
from kvrelay.text.output import OutputText, TextStep
from kvrelay.text.tokenizer import Tokenizer

Answer = Callable[[GenerateRequest, int], Sequence[int]]
"""The ids that choice would be given without limits."""


def echo_prompt(request: GenerateRequest, choice: int) -> Sequence[int]:
    """The prompt again, turned by the choice's number: n choices differ from each other."""
    ids = request.prompt_ids
    return [*ids[choice % len(ids) :], *ids[: choice % len(ids)]]


@dataclass(slots=True)
class Fault:
    """Raise `error` before output number `at` (0 is `Started`)."""

    at: int
    error: BaseException


@dataclass
class FakeFront:
    """Implements FrontDoor. Records what it was asked, and which requests were closed before their end."""

    tokenizer: Tokenizer
    answer: Answer = echo_prompt
    settings: RouterSettings = field(default_factory=RouterSettings)
    card: ModelCard = field(default_factory=lambda: ModelCard("tiny", 256, 1_700_000_000))
    chunk_tokens: int = 1
    """Tokens per Delta."""
    eos_ids: frozenset[int] = frozenset()
    fault: Fault | None = None
    first_token_delay_s: float = 0.0
    hold_at: int | None = None
    """Wait before this output until `go_on` is set."""
    state: Readiness = field(default_factory=lambda: Readiness(True, ""))
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request begins to wait there."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever the last open request has ended, cleared when one begins."""
    requests: list[GenerateRequest] = field(default_factory=list)
    num_open: int = 0
    num_cancelled: int = 0

    def model_card(self) -> ModelCard:
        return self.card

    def readiness(self) -> Readiness:
        return self.state

    async def until_known(self) -> None:
        """The card says what there is to know."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Output, None]:
        self.requests.append(request)
        self.num_open += 1
        self.idle.clear()
        completed = False
        try:
            for number, output in enumerate(self._outputs(request)):
                await self._trouble(number)
                yield output
            completed = True
        except KvrelayError:
            completed = True
            raise
        finally:
            self.num_open -= 1
            self.num_cancelled += not completed
            if self.num_open == 0:
                self.idle.set()

    def open(self, request: GenerateRequest, bell: Bell) -> OpenRequest:
        return _Pumped(self.generate(request), bell)

    async def _trouble(self, number: int) -> None:
        if self.fault is not None and number == self.fault.at:
            raise self.fault.error
        if number == 1 and self.first_token_delay_s:
            await asyncio.sleep(self.first_token_delay_s)
        if number == self.hold_at:
            self.holding.set()
            await self.go_on.wait()

    def _outputs(self, request: GenerateRequest) -> Sequence[Output]:
        started = Started(request.request_id, request.sampling.seed, len(request.prompt_ids))
        per_choice = [self._choice(request, choice) for choice in range(request.n)]
        num_output = sum(num_tokens for _, num_tokens in per_choice)
        summary = Summary(len(request.prompt_ids), num_output, 0, Timing(first_token=1.0))
        return [started, *(output for outputs, _ in per_choice for output in outputs), summary]

    def _choice(self, request: GenerateRequest, choice: int) -> tuple[list[Output], int]:
        """Outputs of one choice and how many tokens it took, as the coordinator would make them."""
        ids, reason = self._limited(request, choice)
        text = OutputText(self.tokenizer, request.stop, request.sampling.min_tokens)
        outputs: list[Output] = []
        for begin in range(0, len(ids), self.chunk_tokens):
            step = text.push(ids[begin : begin + self.chunk_tokens])
            outputs.append(_delta(request, choice, ids, step))
            if step.stop is not None:
                num_tokens = min(begin + self.chunk_tokens, len(ids))
                return [*outputs, ChoiceFinished(Choice(choice), "stop", step.stop)], num_tokens
        step = text.finish()
        outputs.append(_delta(request, choice, ids, step))
        if step.stop is not None:
            reason = "stop"
        return [*outputs, ChoiceFinished(Choice(choice), reason, step.stop)], len(ids)

    def _limited(self, request: GenerateRequest, choice: int) -> tuple[Sequence[int], str]:
        wanted = list(self.answer(request, choice))
        for i, token_id in enumerate(wanted[: request.sampling.max_tokens]):
            if token_id in self.eos_ids:
                return wanted[: i + 1], "stop"
        return wanted[: request.sampling.max_tokens], "length"


_MAX_UNTAKEN = 64


class _Pumped:
    """A generator's outputs for a reader that waits for a bell. Stands still while it does not take them."""

    def __init__(self, outputs: AsyncGenerator[Output, None], bell: Bell) -> None:
        self._bell = bell
        self._room = Bell()
        self._taken: list[Output] = []
        self._pump = asyncio.get_running_loop().create_task(self._run(outputs))
        self._pump.add_done_callback(lambda _: bell.ring())

    def take(self) -> list[Output] | None:
        outputs, self._taken = self._taken, []
        self._room.ring()
        if outputs or not self._pump.done():
            return outputs
        self._pump.result()
        return None

    async def close(self) -> None:
        self._pump.cancel()
        await asyncio.wait([self._pump])

    async def _run(self, outputs: AsyncGenerator[Output, None]) -> None:
        async with aclosing(outputs):
            async for output in outputs:
                while len(self._taken) >= _MAX_UNTAKEN:
                    await self._room.wait()
                self._taken.append(output)
                self._bell.ring()


def _delta(request: GenerateRequest, choice: int, ids: Sequence[int], step: TextStep) -> Delta:
    first = step.num_visible_tokens - len(step.offsets)
    tokens = tuple(_token(request, token_id) for token_id in ids[first : step.num_visible_tokens])
    return Delta(Choice(choice), first, step.text, tokens, step.offsets)


def _token(request: GenerateRequest, token_id: int) -> Token:
    """The likeliest token has -0.5, the next one is impossible: JSON has to cope with that."""
    num_top = request.sampling.logprobs
    if num_top is None:
        return Token(TokenId(token_id))
    top = [(TokenId(token_id), -0.5), (TokenId((token_id + 1) % 256), float("-inf"))]
    top += [(TokenId((token_id + i) % 256), -9.0 - i) for i in range(2, 20)]
    return Token(TokenId(token_id), -0.5, tuple(top[:num_top]))
