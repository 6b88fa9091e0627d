"""A set table for stories: scripted workers, one waiting room, and guests whose whole meal is recorded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from kvrelay.core.config import Config, RouterSettings
from kvrelay.core.errors import KvrelayError
from kvrelay.core.ids import RequestId, TokenId
from kvrelay.core.output import ChoiceFinished, Delta, GenerateRequest, Output, Started, Summary
from kvrelay.core.placement import Role
from kvrelay.core.request import SamplingParams
from kvrelay.observe.metrics import RouterMetrics
from kvrelay.placement.memory import MemoryRegistry
from kvrelay.placement.policy import place
from kvrelay.router.admission import WaitingRoom
from kvrelay.router.coordinator import Coordinator, Kitchen
from kvrelay.router.delivery import Delivery
from kvrelay.router.scripted import ScriptedFleet, ScriptedWorker, expected_ids
from kvrelay.router.session import SessionBook
from kvrelay.text.output import OutputText
from tests.support.virtual_time import VirtualTimeLoop

PROMPT = tuple(TokenId(ord(letter)) for letter in "tell me a story")
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


class Letters:
    """Every id is the byte it stands for."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def words(text: str) -> tuple[TokenId, ...]:
    return tuple(TokenId(ord(letter)) for letter in text)


@dataclass
class Guest:
    """One request: its task, what came out, and how it ended."""

    request: GenerateRequest
    outputs: list[Output] = field(default_factory=list)
    error: KvrelayError | None = None
    task: asyncio.Task[None] | None = None
    delivery: Delivery | None = None

    def text(self, choice: int = 0) -> str:
        return "".join(each.text for each in self.outputs if isinstance(each, Delta) and each.choice == choice)

    def ids(self, choice: int = 0) -> tuple[int, ...]:
        """Checks on the way that indices are contiguous."""
        ids: list[int] = list(self.request.resume)
        for each in self.outputs:
            if isinstance(each, Delta) and each.choice == choice:
                if each.tokens:
                    assert each.first_index == len(ids), "an index was missed or repeated"
                ids += [token.token_id for token in each.tokens]
        return tuple(ids[len(self.request.resume) :])

    def finish(self, choice: int = 0) -> ChoiceFinished:
        [finished] = [each for each in self.outputs if isinstance(each, ChoiceFinished) and each.choice == choice]
        return finished

    @property
    def summary(self) -> Summary:
        assert isinstance(self.outputs[-1], Summary)
        return self.outputs[-1]

    @property
    def started(self) -> Started:
        assert isinstance(self.outputs[0], Started)
        return self.outputs[0]

    def expected(self, choice: int = 0) -> tuple[TokenId, ...]:
        return expected_ids(self.request.prompt_ids, self.request.sampling, choice)


def assert_undisturbed(guest: Guest) -> None:
    assert guest.error is None
    for choice in range(guest.request.n):
        assert guest.ids(choice) == guest.expected(choice)
        assert guest.finish(choice).finish_reason == "length"
    assert guest.summary.num_output_tokens == guest.request.n * guest.request.sampling.max_tokens


class Table:
    """`prefill` and `decode` are counts; the workers are called prefill-0, decode-0, ..."""

    def __init__(self, prefill: int = 1, decode: int = 1, mixed: int = 0, **settings: float) -> None:
        self.fleet = ScriptedFleet()
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.MIXED, mixed)):
            for index in range(count):
                self.fleet.add(f"{role.value}-{index}", role)
        self.room = WaitingRoom()
        self.fleet.changed = self.room.changed
        config = Config(router=replace(RouterSettings(), **settings))  # type: ignore[arg-type]
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        self.registry = MemoryRegistry(config.placement, loop)
        self.sessions = SessionBook(self.registry)
        self.kitchen = Kitchen(
            config=config, fleet=self.fleet, room=self.room, sessions=self.sessions, metrics=RouterMetrics(),
            place=place,
            new_text=lambda request: OutputText(Letters(), request.stop, request.sampling.min_tokens),
            stopwatch=loop.time,
        )
        self._num_guests = 0

    def worker(self, name: str) -> ScriptedWorker:
        return next(each for each in self.fleet.workers.values() if each.record.worker_id == name)

    def seat(self, sampling: SamplingParams = GREEDY, *, reads: bool = True, **fields: object) -> Guest:
        self._num_guests += 1
        request = GenerateRequest(
            request_id=RequestId(f"r{self._num_guests}"), prompt_ids=PROMPT, sampling=sampling,
            **fields,  # type: ignore[arg-type]
        )
        guest = Guest(request)
        guest.delivery = Delivery(self.kitchen.config.router.max_delta_queue)
        guest.task = asyncio.get_running_loop().create_task(self._dine(guest, guest.delivery, reads))
        return guest

    async def _dine(self, guest: Guest, delivery: Delivery, reads: bool) -> None:
        work = asyncio.get_running_loop().create_task(Coordinator(guest.request, self.kitchen, delivery).run())
        try:
            if reads:
                await self.read(guest)
            else:
                await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def read(self, guest: Guest) -> None:
        assert guest.delivery is not None
        try:
            async for output in guest.delivery:
                guest.outputs.append(output)
        except KvrelayError as error:
            guest.error = error

    async def serve(self, sampling: SamplingParams = GREEDY, **fields: object) -> Guest:
        guest = self.seat(sampling, **fields)  # type: ignore[arg-type]
        return await self.finish(guest)

    async def finish(self, guest: Guest) -> Guest:
        assert guest.task is not None
        await guest.task
        return guest

    async def leaves(self, guest: Guest) -> None:
        """The client hangs up."""
        assert guest.task is not None
        guest.task.cancel()
        await asyncio.gather(guest.task, return_exceptions=True)

    async def assert_empty(self) -> None:
        await asyncio.sleep(0)
        for worker in self.fleet.workers.values():
            assert worker.is_empty, f"{worker.record.worker_id} still has work"
        assert len(self.room) == 0
        await self.sessions.close()
