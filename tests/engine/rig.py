"""An engine with fakes all around it, and starts in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kvrelay.core.clock import FakeClock
from kvrelay.core.config import EngineSettings
from kvrelay.core.events import (
    TERMINAL,
    Committed,
    Event,
    Failed,
    FailReason,
    Finished,
    FirstToken,
    Refused,
    RefuseReason,
    Token,
    Tokens,
)
from kvrelay.core.handoff import ChoiceTokens, Commit, Handoff
from kvrelay.core.ids import Attempt, Choice, RequestId, SeqKey, TokenId, TransferId
from kvrelay.core.request import Leg, SamplingParams, Start
from kvrelay.engine.engine import Engine
from kvrelay.engine.fakes import FakeRunner, FakeTransfer, RecordingOutbox
from kvrelay.engine.spec import EngineSpec
from tests.support.empty import assert_worker_is_empty

E = TypeVar("E", bound=Event)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def prompt(length: int, salt: int = 0) -> list[TokenId]:
    return [TokenId((i * 7 + salt * 31 + 3) % 200) for i in range(length)]


class Rig:
    def __init__(
        self,
        num_blocks: int = 64,
        *,
        block_size: int = 16,
        max_context: int = 256,
        eos: Sequence[int] = (),
        max_reservations: int = 256,
        **settings: Any,
    ) -> None:
        self.settings = replace(EngineSettings(block_size=block_size), **settings)
        self.spec = EngineSpec(num_blocks, block_size, max_context, frozenset(eos), "model", "float32", 256)
        self.runner = FakeRunner(block_size, 256, frozenset(eos))
        self.transfer = FakeTransfer()
        self.outbox = RecordingOutbox()
        self.clock = FakeClock()
        self.engine = Engine(
            self.settings, self.spec, self.runner, self.transfer, self.outbox, self.clock,
            max_reservations=max_reservations,
        )  # fmt: skip

    def start(
        self,
        token_ids: Sequence[TokenId],
        sampling: SamplingParams = GREEDY,
        *,
        request: str = "r",
        leg: Leg = Leg.LOCAL,
        n: int = 1,
        **more: Any,
    ) -> Start:
        """Submit it. SEND gets a handoff to nobody in particular."""
        values: dict[str, Any] = {"attempt": Attempt(0), "num_prompt": len(token_ids)}
        if leg is not Leg.LOCAL:
            values["transfer_id"] = TransferId(f"t-{request}")
        if leg is Leg.SEND:
            values["handoff"] = Handoff(values["transfer_id"], (), more.pop("handoff_cached", 0))
        values["choices"] = tuple(Choice(i) for i in range(n))
        values.update(more)
        start = Start(request_id=RequestId(request), token_ids=token_ids, sampling=sampling, leg=leg, **values)
        self.engine.submit(start)
        return start

    def replay(self, start: Start, choice: Choice, output: Sequence[TokenId]) -> Start:
        """The same choice again with what it has said so far; not submitted."""
        return replace(
            start, attempt=Attempt(start.attempt + 1), choices=(choice,), replay=True,
            token_ids=[*start.token_ids[: start.num_prompt], *output],
        )  # fmt: skip

    def run(self, max_steps: int = 2000) -> None:
        """Step until there is nothing to compute."""
        for _ in range(max_steps):
            self.clock.advance(0.001)
            if not self.engine.step():
                return
        raise AssertionError("the engine does not come to rest")

    def expected(self, start: Start, choice: int = 0) -> list[TokenId]:
        return self.runner.model.continue_from(
            start.token_ids, start.num_prompt, start.sampling, Choice(choice), limit=self.spec.max_sequence
        )

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.outbox.events if isinstance(event, kind)]

    def output(self, start: Start, choice: int = 0) -> list[TokenId]:
        """What the worker said for this choice, checked for order and gaps, on top of what the start brought along."""
        key = start.key(Choice(choice))
        said = list(start.token_ids[start.num_prompt :])
        for event in self.outbox.events:
            if isinstance(event, FirstToken) and event.key == key:
                assert event.index == len(said)
                said.append(event.token.token_id)
            elif isinstance(event, Tokens | Committed) and event.key == key:
                assert event.first_index == len(said)
                said.extend(token.token_id for token in event.tokens)
        return said

    def end(self, start: Start, choice: int = 0) -> Finished | Failed | Refused:
        """The one terminal event of a choice."""
        key = start.key(Choice(choice))
        ends = [event for event in self.outbox.events if isinstance(event, TERMINAL) and event.key == key]
        assert len(ends) == 1, ends
        assert isinstance(ends[0], Finished | Failed | Refused)
        return ends[0]

    def refusal(self, start: Start) -> RefuseReason:
        end = self.end(start)
        assert isinstance(end, Refused), end
        return end.reason

    def failure(self, start: Start, choice: int = 0) -> FailReason:
        end = self.end(start, choice)
        assert isinstance(end, Failed), end
        return end.reason

    def assert_right(self, start: Start, n: int = 1) -> None:
        """Every choice said exactly what a correct engine says, and finished."""
        for choice in range(n):
            assert self.output(start, choice) == self.expected(start, choice)
            assert isinstance(self.end(start, choice), Finished)

    def first_tokens(self, start: Start, n: int = 1) -> tuple[ChoiceTokens, ...]:
        """What a sender would have drawn."""
        return tuple(ChoiceTokens(Choice(i), (Token(self.expected(start, i)[start.next_index]),)) for i in range(n))

    def land(self, start: Start, choices: Sequence[ChoiceTokens], num_tokens: int | None = None) -> bool:
        """The KV of the start arrives; steps once for the engine to answer."""
        assert start.transfer_id is not None
        commit = Commit(start.num_tokens if num_tokens is None else num_tokens, 1, tuple(choices))
        replies = self.transfer.land(self.engine, self.runner, start.transfer_id, start.token_ids, commit)
        self.engine.step()
        assert len(replies) == 1
        return replies[0]

    def end_push(self, start: Start, error: str = "") -> None:
        assert start.transfer_id is not None
        self.transfer.end_push(self.engine, start.transfer_id, error)
        self.engine.step()

    def end_send(self, start: Start, error: str = "") -> None:
        assert start.transfer_id is not None
        self.transfer.end_send(self.engine, start.transfer_id, error)
        self.engine.step()

    def cancel(self, key: SeqKey) -> None:
        self.engine.cancel(key)
        self.engine.step()

    def assert_empty(self) -> None:
        assert_worker_is_empty(self.engine)
