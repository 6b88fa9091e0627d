"""Prefill and decode as they are, engines and transfer desks, through any order of whatever can happen between them.

    nothing is written into a block that the receiver has not reserved, nothing is read from one that was not lent
    free + held + cached + draining = total, on both sides
    a commit is applied once, and only over blocks that hold what the prompt makes
    what the prefix index offers holds what its name says
    after some quiet nothing is left on either side, and everybody who was told a token was told the right one
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.core.events import TERMINAL, Committed, Event, FirstToken, Reserved, Tokens
from kvrelay.core.handoff import Commit, Handoff, Receiver
from kvrelay.core.ids import Attempt, BlockHash, Choice, RequestId, SeqKey, TokenId, TransferId
from kvrelay.core.kv import blocks_for
from kvrelay.core.placement import Load
from kvrelay.core.request import Leg, SamplingParams, Start
from kvrelay.engine.fakes import digests
from kvrelay.transfer.pipes import LoopbackPipe
from tests.support.plant import BLOCK, MAX_CONTEXT, Plant, blocks_of
from tests.support.virtual_time import VirtualTimeLoop
from tests.support.weather import StormyPipe, Weather

TICK_S = 0.25


class Ear:
    """`EngineOutbox` of one plant: checks what is said about each choice as it is said."""

    def __init__(self, oracle: dict[SeqKey, list[TokenId]]) -> None:
        self._oracle = oracle
        self.reserved: dict[TransferId, int] = {}
        self.ended: set[SeqKey] = set()
        self.committed: set[SeqKey] = set()
        self.starts: dict[SeqKey, Start] = {}

    def on_step(self, events: Sequence[Event], load: Load) -> None:
        for event in events:
            key = event.key
            assert key not in self.ended, f"{event} after the end"
            match event:
                case Reserved():
                    self.reserved[self.starts[key].transfer_id or TransferId("")] = event.num_cached_tokens
                case FirstToken():
                    self._check(key, event.index, [event.token.token_id])
                case Committed() | Tokens():
                    assert not isinstance(event, Committed) or key not in self.committed, "a commit was applied twice"
                    self.committed |= {key} if isinstance(event, Committed) else set()
                    self._check(key, event.first_index, [token.token_id for token in event.tokens])
            if isinstance(event, TERMINAL):
                self.ended.add(key)

    def on_death(self, error: BaseException) -> None:
        raise error

    def _check(self, key: SeqKey, first_index: int, said: list[TokenId]) -> None:
        assert self._oracle[key][first_index : first_index + len(said)] == said, key


class Watched(Plant):
    """Looks at the blocks in the moment a commit is applied."""

    def watch_landings(self, tokens_of: dict[TransferId, list[TokenId]]) -> None:
        land = self.engine._committer.land

        def watched(transfer_id: TransferId, commit: Commit) -> bool:
            reservation = self.engine.work.reservations._open.get(transfer_id)
            runs = land(transfer_id, commit)
            if runs:
                assert reservation is not None
                whole = digests(tokens_of[transfer_id])
                first = blocks_for(len(whole), BLOCK) - len(reservation.blocks)
                arrived = range(first * BLOCK, len(whole))
                found = [self.runner.kv.get((reservation.blocks[i // BLOCK - first], i % BLOCK)) for i in arrived]
                assert found == whole[first * BLOCK :], f"{transfer_id} landed on other KV than its prompt makes"
            return runs

        self.engine._committer.land = watched  # type: ignore[method-assign]


class BothEnds(RuleBasedStateMachine):
    """Two prefill plants, so that one handoff can be sent twice, and one decode plant. Any of them may die."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        asyncio.set_event_loop(self.loop)
        self.weather = Weather()
        self.door = LoopbackPipe()
        self.oracle: dict[SeqKey, list[TokenId]] = {}
        self.known: dict[BlockHash, list[int]] = {}
        self.prompts: dict[TransferId, list[TokenId]] = {}
        self.receives: dict[TransferId, tuple[Start, Receiver]] = {}
        self.keys: list[SeqKey] = []
        self.lives = {"p": 0, "q": 0, "d": 0}
        self.ears: dict[str, Ear] = {}
        self.plants: dict[str, Watched] = {}
        for name in self.lives:
            self.born(name)

    def born(self, name: str) -> None:
        async def build() -> Watched:
            pipe = None if name == "d" else StormyPipe(self.door, self.weather)
            return Watched(
                name, self.ears[name], self.loop, door=self.door, pipe=pipe, life=self.lives[name], num_blocks=20,
                max_batch_tokens=24, growth_tokens=8,
            )

        self.lives[name] += 1
        self.ears[name] = Ear(self.oracle)
        self.plants[name] = self.loop.run_until_complete(build())
        self.plants[name].watch_landings(self.prompts)

    def run_for(self, seconds: float) -> None:
        async def tick() -> None:
            self.step_both()
            await asyncio.sleep(min(TICK_S, seconds))

        for _ in range(max(1, int(seconds / TICK_S))):
            self.loop.run_until_complete(tick())

    def step_both(self) -> None:
        for plant in self.plants.values():
            plant.engine.step()

    def settle(self) -> None:
        """What was posted has its turn; nothing else does."""
        self.loop.run_until_complete(asyncio.sleep(0))

    @rule(
        length=st.integers(20, 90), max_tokens=st.integers(2, 20), is_greedy=st.booleans(), name=st.sampled_from("pq"),
        num_ticks=st.integers(0, 8),
    )  # fmt: skip
    def relay(self, length: int, max_tokens: int, is_greedy: bool, name: str, num_ticks: int) -> None:
        """As a router does it, up to some moment."""
        self.reserve(length, 0, 1, max_tokens, is_greedy, 600_000, False)
        transfer_id, (start, receiver) = next(reversed(self.receives.items()))
        self.step("d")
        if transfer_id in self.ears["d"].reserved:
            self.send_to(name, start, receiver)
        for _ in range(num_ticks):
            self.step_both()
            self.settle()

    @rule(
        length=st.integers(1, 90), family=st.integers(0, 1), n=st.sampled_from([1, 1, 2]),
        max_tokens=st.integers(2, 20), is_greedy=st.booleans(), timeout_ms=st.sampled_from([3_000, 600_000]),
        replay=st.booleans(),
    )  # fmt: skip
    def reserve(
        self, length: int, family: int, n: int, max_tokens: int, is_greedy: bool, timeout_ms: int, replay: bool
    ) -> None:
        number = len(self.receives)
        tokens = [TokenId((i * 7 + family * 31 + 3) % 200) for i in range(length)]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0 if is_greedy else 1.0, seed=number)
        start = Start(
            RequestId(f"r{number}"), Attempt(0), tuple(map(Choice, range(n))), tokens, length, sampling, Leg.RECEIVE,
            TransferId(f"t{number}"), timeout_ms=timeout_ms, replay=replay,
        )  # fmt: skip
        self.know(start)
        self.receives[TransferId(f"t{number}")] = (start, self.plants["d"].receiver)
        self.tell("d", start)

    def know(self, start: Start) -> None:
        model = self.plants["d"].runner.model
        self.prompts[start.transfer_id or TransferId("")] = list(start.token_ids)
        for choice in start.choices:
            said = model.continue_from(start.token_ids, start.num_prompt, start.sampling, choice, limit=MAX_CONTEXT)
            self.oracle[start.key(choice)] = said
            self.keys.append(start.key(choice))
            self.known |= blocks_of([*start.token_ids, *said])

    def tell(self, name: str, start: Start) -> None:
        ear = self.ears[name]
        if all(start.key(choice) not in ear.starts for choice in start.choices):
            ear.starts |= {start.key(choice): start for choice in start.choices}
            self.plants[name].engine.submit(start)

    @precondition(lambda self: any(ear.reserved for ear in self.ears.values()))
    @rule(data=st.data(), name=st.sampled_from(["p", "p", "q"]))
    def send(self, data: st.DataObject, name: str) -> None:
        """Also late, also twice, also to a decode plant that has died meanwhile."""
        self.send_to(name, *self.receives[data.draw(st.sampled_from(list(self.receives)[-4:]))])

    def send_to(self, name: str, start: Start, receiver: Receiver) -> None:
        transfer_id = start.transfer_id or TransferId("")
        handoff = Handoff(transfer_id, (receiver,), self.ears["d"].reserved.get(transfer_id, 0))
        self.tell(name, replace(start, leg=Leg.SEND, handoff=handoff, replay=False))

    @rule(data=st.data(), name=st.sampled_from(["p", "q", "d"]), luck=st.integers(0, 1))
    def cancel(self, data: st.DataObject, name: str, luck: int) -> None:
        if self.keys and luck == 0:
            self.plants[name].engine.cancel(data.draw(st.sampled_from(self.keys[-6:])))

    @rule(name=st.sampled_from(["p", "q", "d"]))
    def step(self, name: str) -> None:
        self.plants[name].engine.step()
        self.settle()

    @rule(turns=st.integers(1, 6))
    def pipes_move(self, turns: int) -> None:
        for _ in range(turns):
            self.settle()

    @rule(seconds=st.sampled_from([0.25, 0.25, 1.0, 3.0, 8.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.run_for(seconds)

    @rule(name=st.sampled_from(["p", "q", "d"]), luck=st.integers(0, 3))
    def die(self, name: str, luck: int) -> None:
        if luck:
            return
        self.loop.run_until_complete(self._die(self.plants[name]))
        self.born(name)

    async def _die(self, plant: Plant) -> None:
        plant.die()

    @rule(
        seed=st.integers(0, 999), loss=st.sampled_from([0.0, 0.0, 0.3]), repeat=st.sampled_from([0.0, 0.0, 0.3]),
        swap=st.sampled_from([0.0, 0.0, 0.3]), delay=st.sampled_from([0.0, 0.0, 0.3]), harm=st.sampled_from([0.0, 0.2]),
    )  # fmt: skip
    def weather_changes(
        self, seed: int, loss: float, repeat: float, swap: float, delay: float, harm: float
    ) -> None:
        self.weather.change(seed, loss=loss, repeat=repeat, swap=swap, delay=delay, harm=harm)

    @rule()
    def weather_clears(self) -> None:
        self.weather.change(0)

    @invariant()
    def the_books_hold(self) -> None:
        for plant in self.plants.values():
            plant.check()
            plant.check_matchable(self.known)

    def teardown(self) -> None:
        try:
            for key in self.keys:
                for plant in self.plants.values():
                    plant.engine.cancel(key)
            self.run_for(45)
            for name, plant in self.plants.items():
                plant.assert_empty()
                assert self.ears[name].ended == set(self.ears[name].starts), "a choice has no last word"
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()


BothEnds.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestBothEnds = BothEnds.TestCase
