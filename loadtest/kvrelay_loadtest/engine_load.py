"""An engine with everything but a network: the yard in which `bench engine` times steps.

Decoding sequences get their context as a decode worker does, by a handoff: the engine reserves blocks, hears that the
KV has landed, and decodes from there. No prompt is computed, whatever the length; the bytes in the blocks are noise,
and the time of a step does not depend on them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.core.batch import Runner, StepPlan, StepResult
from kvrelay.core.clock import Clock, SystemClock
from kvrelay.core.config import EngineSettings
from kvrelay.core.events import Event, Failed, Finished, Refused, Token
from kvrelay.core.handoff import ChoiceTokens, Commit
from kvrelay.core.ids import Attempt, Choice, RequestId, TokenId, TransferId
from kvrelay.core.placement import Load
from kvrelay.core.ports import EngineOutbox, Expected, Outgoing
from kvrelay.core.request import Leg, SamplingParams, Start
from kvrelay.engine.engine import Engine
from kvrelay.engine.spec import EngineSpec

NEVER_MS = 86_400_000


class EngineFailed(Exception):
    """A sequence of the bench was refused or failed: the measurement is void."""


@dataclass(slots=True)
class TimedRunner:
    """Passes steps on and keeps the time that the last one took."""

    runner: Runner
    seconds: float = 0.0
    num_rows: int = 0

    def run(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        result = self.runner.run(plan)
        self.seconds = time.perf_counter() - began
        self.num_rows = len(plan.rows)
        return result


@dataclass(slots=True)
class LandingTransfer:
    """`TransferPort` whose Pushes have all arrived: `expected` is emptied by `Yard.land`."""

    expected: list[Expected] = field(default_factory=list)

    def expect(self, expected: Expected) -> None:
        self.expected.append(expected)

    def close(self, transfer_id: TransferId) -> None: ...

    def send(self, outgoing: Outgoing) -> None: ...

    def progress(self, transfer_id: TransferId, num_computed: int) -> None: ...

    def finish(self, transfer_id: TransferId, commit: Commit) -> None: ...

    def abort_send(self, transfer_id: TransferId) -> None: ...


@dataclass(slots=True)
class CountingOutbox:
    """`EngineOutbox` that keeps what went wrong and how many sequences ended."""

    then: EngineOutbox | None = None
    num_finished: int = 0
    problem: str = ""

    def on_step(self, events: Sequence[Event], load: Load) -> None:
        for event in events:
            if isinstance(event, Finished):
                self.num_finished += 1
            elif isinstance(event, Failed | Refused):
                self.problem = f"{event.reason.value}: {event.message}"
        if self.then is not None:
            self.then.on_step(events, load)

    def on_death(self, error: BaseException) -> None:
        self.problem = repr(error)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step: `model_s` inside the runner (model and sampling), the rest is the engine's Python."""

    total_s: float
    model_s: float

    @property
    def python_s(self) -> float:
        return self.total_s - self.model_s


class Yard:
    """One engine, stepped by hand."""

    def __init__(
        self, settings: EngineSettings, spec: EngineSpec, runner: Runner, *, seed: int = 0,
        outbox: EngineOutbox | None = None, clock: Clock | None = None,
    ) -> None:
        """`outbox` gets every step's events too."""
        self._transfer = LandingTransfer()
        self._outbox = CountingOutbox(outbox)
        self._runner = TimedRunner(runner)
        self._random = random.Random(seed)
        self._vocab = spec.vocab_size
        self._lengths: dict[TransferId, int] = {}
        self.engine = Engine(settings, spec, self._runner, self._transfer, self._outbox, clock or SystemClock())

    def decode(self, batch: int, context: int, num_tokens: int) -> None:
        """`batch` sequences of `context` tokens, KV and all, ready to draw `num_tokens` more."""
        for number in range(batch):
            transfer_id = TransferId(f"t{len(self._lengths)}")
            self._lengths[transfer_id] = context
            self._submit(f"decode-{number}", context, num_tokens + 1, Leg.RECEIVE, transfer_id)
        self.step()
        self._land()

    def prefill(self, num_tokens: int) -> float:
        """Seconds from the arrival of a prompt to its first token, nothing else running."""
        finished = self._outbox.num_finished
        began = time.perf_counter()
        self._submit(f"prefill-{finished}", num_tokens, 1, Leg.LOCAL, None)
        while self._outbox.num_finished == finished:
            self.step()
        return time.perf_counter() - began

    def step(self) -> StepTime:
        self._runner.seconds = 0.0
        began = time.perf_counter()
        self.engine.step()
        total_s = time.perf_counter() - began
        if self._outbox.problem:
            raise EngineFailed(self._outbox.problem)
        return StepTime(total_s, self._runner.seconds)

    @property
    def num_rows(self) -> int:
        """Of the last step."""
        return self._runner.num_rows

    def _land(self) -> None:
        while self._transfer.expected:
            transfer_id = self._transfer.expected.pop().transfer_id
            first = ChoiceTokens(Choice(0), (Token(self._token()),))
            self.engine.landed(transfer_id, Commit(self._lengths[transfer_id], 1, (first,)), lambda _: None)
            self.engine.push_ended(transfer_id, "")

    def _submit(self, name: str, length: int, max_tokens: int, leg: Leg, transfer_id: TransferId | None) -> None:
        self.engine.submit(
            Start(
                request_id=RequestId(name), attempt=Attempt(0), choices=(Choice(0),),
                token_ids=[self._token() for _ in range(length)], num_prompt=length,
                sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
                leg=leg, transfer_id=transfer_id, timeout_ms=NEVER_MS,
            )
        )  # fmt: skip

    def _token(self) -> TokenId:
        return TokenId(self._random.randrange(self._vocab))
