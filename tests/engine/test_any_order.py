"""Whatever happens in whatever order: the books hold after each step, and every choice says the right tokens.

The transfer side is played as badly as it may behave: a push that was closed still writes rubbish into its blocks
until the moment it reports its end, and a send still reads its blocks until the moment it reports its own.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay.core.events import (
    TERMINAL,
    Committed,
    Event,
    Failed,
    FailReason,
    Finished,
    FinishReason,
    FirstToken,
    Leaving,
    Tokens,
)
from kvrelay.core.handoff import ChoiceTokens, Commit, Handoff
from kvrelay.core.ids import Attempt, Choice, SeqKey, TokenId, TransferId
from kvrelay.core.request import Leg, Migrate, SamplingParams, Start
from kvrelay.engine.fakes import digests
from tests.engine.rig import Rig, prompt

RUBBISH = -1


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.starts: dict[str, Start] = {}
        self.by_key: dict[SeqKey, Start] = {}
        self.said: dict[SeqKey, list[TokenId]] = {}
        self.ends: dict[SeqKey, list[Event]] = {}
        self.landed: set[TransferId] = set()
        self.leaving: set[SeqKey] = set()
        self.moves: dict[TransferId, list[TokenId]] = {}
        """What the receiver of each has reserved for."""
        self.eager: list[tuple[Start, Choice]] = []

    @initialize(
        num_blocks=st.sampled_from([8, 14, 30]), block_size=st.sampled_from([1, 4, 16]),
        budget=st.sampled_from([8, 24, 512]), growth=st.sampled_from([1, 5, 64]),
        watermark=st.sampled_from([0.0, 0.02, 0.2]), has_eos=st.booleans(),
    )  # fmt: skip
    def begin(
        self, num_blocks: int, block_size: int, budget: int, growth: int, watermark: float, has_eos: bool
    ) -> None:
        self.rig = Rig(
            num_blocks, block_size=block_size, max_context=100, eos=range(0, 256, 16) if has_eos else (),
            max_reservations=3, max_batch_tokens=budget, max_num_seqs=6, max_waiting=4, growth_tokens=growth,
            watermark_fraction=watermark,
        )  # fmt: skip

    @rule(
        leg=st.sampled_from(Leg), length=st.integers(1, 90), family=st.integers(0, 1), tail=st.integers(0, 2),
        n=st.sampled_from([1, 1, 1, 2, 3]), max_tokens=st.integers(1, 40), min_tokens=st.integers(0, 3),
        seed=st.integers(0, 1), is_replay=st.booleans(), priority=st.integers(0, 1),
        timeout_ms=st.sampled_from([50, 600_000]),
    )  # fmt: skip
    def submit(
        self, leg: Leg, length: int, family: int, tail: int, n: int, max_tokens: int, min_tokens: int, seed: int,
        is_replay: bool, priority: int, timeout_ms: int,
    ) -> None:  # fmt: skip
        room = self.rig.spec.max_sequence
        token_ids = prompt(min(length, room), family)[: max(room - 1, 1)] + [TokenId(7)] * tail
        sampling = SamplingParams(max_tokens=max_tokens, temperature=float(seed), seed=seed, min_tokens=min_tokens)
        name = f"r{len(self.starts)}"
        start = self.rig.start(
            token_ids, sampling, request=name, leg=leg, n=n, replay=is_replay, priority=priority, timeout_ms=timeout_ms
        )
        self._know(name, start)

    @rule()
    def step(self) -> None:
        self.rig.clock.advance(0.001)
        self.rig.engine.step()
        self._hear()

    @rule(count=st.integers(2, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @rule()
    def wait_long(self) -> None:
        self.rig.clock.advance(0.06)

    @precondition(lambda self: self.by_key)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.rig.engine.cancel(data.draw(st.sampled_from(sorted(self.by_key, key=str))))

    @precondition(lambda self: self.eager)
    @rule()
    def replay_what_was_preempted(self) -> None:
        start, choice = self.eager.pop()
        again = self.rig.replay(start, choice, self.said[start.key(choice)])
        self.rig.engine.submit(again)
        self._know(f"{again.request_id}/{choice}@{again.attempt}", again)

    @precondition(lambda self: len(self.starts) > 8)
    @rule()
    def drain(self) -> None:
        self.rig.engine.drain()

    @precondition(lambda self: self.leaving)
    @rule(data=st.data(), behind=st.integers(0, 2))
    def migrate(self, data: st.DataObject, behind: int) -> None:
        """`behind`: the router has not heard the newest tokens yet."""
        key = data.draw(st.sampled_from(sorted(self.leaving, key=str)))
        start, output = self.by_key[key], self.said[key]
        num_tokens = start.num_prompt + max(len(output) - behind, 0)
        transfer_id = TransferId(f"move-{len(self.moves)}")
        self.moves[transfer_id] = [*start.token_ids[: start.num_prompt], *output][:num_tokens]
        handoff = Handoff(transfer_id, (), 0)
        self.rig.engine.migrate(Migrate(key, Attempt(start.attempt + 1), num_tokens, handoff))

    @precondition(lambda self: self.moves)
    @rule(data=st.data())
    def level(self, data: st.DataObject) -> None:
        self.rig.engine.send_level(data.draw(st.sampled_from(sorted(self.moves))))

    @precondition(lambda self: set(self.rig.transfer.expected) - self.landed)
    @rule(data=st.data(), fault=st.sampled_from(["", "", "", "count", "choice"]))
    def land(self, data: st.DataObject, fault: str) -> None:
        transfer_id = data.draw(st.sampled_from(sorted(set(self.rig.transfer.expected) - self.landed)))
        start = self._start_of(transfer_id)
        drawn = self._first_tokens(start)
        if fault == "choice":
            drawn = drawn[1:]
        num_tokens = start.num_tokens + (fault == "count")
        self._land(start, Commit(num_tokens, 1, tuple(drawn)))

    @precondition(lambda self: self.rig.transfer.expected)
    @rule(data=st.data())
    def end_push(self, data: st.DataObject) -> None:
        self._end_push(data.draw(st.sampled_from(sorted(self.rig.transfer.expected))))

    @precondition(lambda self: self.rig.transfer.outgoing)
    @rule(data=st.data(), fails=st.booleans())
    def end_send(self, data: st.DataObject, fails: bool) -> None:
        self._end_send(data.draw(st.sampled_from(sorted(self.rig.transfer.outgoing))), fails)

    @invariant()
    def the_books_hold(self) -> None:
        rig, pool = self.rig, self.rig.engine.cache.pool
        pool.check()
        assert pool.num_free + pool.num_cached + pool.num_held + pool.num_draining == pool.num_blocks
        for plan in rig.runner.plans:
            assert len(plan.rows) <= rig.settings.max_num_seqs
            assert 0 < plan.num_tokens <= rig.settings.max_batch_tokens
        rig.runner.plans.clear()
        assert len(rig.engine.work.reservations) <= 3

    def teardown(self) -> None:
        for _ in range(400):
            self.steps(5)
            for transfer_id in sorted(self.rig.transfer.outgoing):
                self._end_send(transfer_id, False)
            for transfer_id in sorted(self.rig.transfer.expected):
                self._end_push(transfer_id)
            if not self.rig.engine.step() and not self.rig.engine.work.by_key and not self.rig.transfer.outgoing:
                break
        self.step()
        self._hear()
        self.rig.assert_empty()
        for key in self.by_key:
            assert len(self.ends[key]) == 1, key
            self._check_said(key)

    def _know(self, name: str, start: Start) -> None:
        self.starts[name] = start
        for choice in start.choices:
            key = start.key(choice)
            self.by_key[key] = start
            self.ends[key] = []
            self.said[key] = list(start.token_ids[start.num_prompt :])

    def _start_of(self, transfer_id: TransferId) -> Start:
        expected = self.rig.transfer.expected[transfer_id]
        return next(
            start for start in reversed(self.starts.values())
            if start.transfer_id == transfer_id and start.attempt == expected.attempt
        )  # fmt: skip

    def _first_tokens(self, start: Start) -> list[ChoiceTokens]:
        whole = self.rig.first_tokens(start, max(start.choices) + 1)
        return [whole[choice] for choice in start.choices]

    def _land(self, start: Start, commit: Commit) -> None:
        assert start.transfer_id is not None
        replies = self.rig.transfer.land(self.rig.engine, self.rig.runner, start.transfer_id, start.token_ids, commit)
        self.step()
        if replies[0]:
            self.landed.add(start.transfer_id)

    def _end_push(self, transfer_id: TransferId) -> None:
        has_landed = transfer_id in self.landed
        if not has_landed:
            expected = self.rig.transfer.expected[transfer_id]
            for block in expected.blocks:
                for slot in range(self.rig.spec.block_size):
                    self.rig.runner.kv[block, slot] = RUBBISH
        self.landed.discard(transfer_id)
        self.rig.transfer.end_push(self.rig.engine, transfer_id, "" if has_landed else "ended")

    def _end_send(self, transfer_id: TransferId, fails: bool) -> None:
        transfer, size = self.rig.transfer, self.rig.spec.block_size
        outgoing = transfer.outgoing[transfer_id]
        token_ids = self.moves.get(transfer_id) or next(
            start.token_ids for start in self.starts.values() if start.transfer_id == transfer_id
        )
        is_committed = transfer_id in transfer.commits and transfer_id not in transfer.aborted
        num_computed = len(token_ids) if is_committed else max(transfer.progressed.get(transfer_id, [0]))
        for position, digest in enumerate(digests(token_ids)[:num_computed]):
            assert self.rig.runner.kv[outgoing.blocks[position // size], position % size] == digest
        transfer.end_send(self.rig.engine, transfer_id, "" if is_committed and not fails else "failed")

    def _hear(self) -> None:
        for event in self.rig.outbox.take():
            key = event.key
            if isinstance(event, FirstToken):
                assert event.index == len(self.said[key])
                self.said[key].append(event.token.token_id)
            elif isinstance(event, Tokens | Committed):
                assert event.first_index == len(self.said[key])
                self.said[key].extend(token.token_id for token in event.tokens)
            if isinstance(event, Leaving):
                self.leaving.add(key)
            if isinstance(event, TERMINAL):
                self.leaving.discard(key)
                self.ends[key].append(event)
                assert len(self.ends[key]) == 1, (key, self.ends[key])
            elif not isinstance(event, FirstToken | Tokens | Committed):
                continue
            else:
                assert not self.ends[key]
            if isinstance(event, Failed) and event.reason is FailReason.PREEMPTED:
                self.eager.append((self.by_key[key], key.choice))

    def _check_said(self, key: SeqKey) -> None:
        start = self.by_key[key]
        expected = self.rig.expected(start, key.choice)
        assert self.said[key] == expected[: len(self.said[key])], key
        if any(isinstance(end, Finished) and end.reason is not FinishReason.HANDED_OFF for end in self.ends[key]):
            assert self.said[key] == expected


AnyOrder.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrder = AnyOrder.TestCase
