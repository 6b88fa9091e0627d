"""The two stops between the engine thread and a stream: nothing lost, nothing reordered, nothing without a bound."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.events import Event, Finished, FinishReason, FirstToken, Token, Tokens
from kvrelay.core.ids import TokenId
from kvrelay.core.placement import Load
from kvrelay.worker.outbox import LinkOutbox, StepOutbox
from tests.support.virtual_time import run_virtual
from tests.worker.support import key, tokens


def busy(num_held: int) -> Load:
    return Load(num_blocks=64, num_held=num_held)


def test_tokens_of_one_sequence_coalesce_while_nobody_writes() -> None:
    async def story() -> None:
        outbox = LinkOutbox(max_bytes=1 << 20)
        first = FirstToken(key(), 0, Token(TokenId(1)), 0, 0.0, 0.0)
        assert outbox.put([first, tokens(key("b"), 4, [40])], busy(1))
        assert outbox.put([tokens(key(), 1, [2]), tokens(key("b"), 5, [41])], busy(2))
        assert outbox.put([tokens(key(), 2, [3]), Finished(key(), FinishReason.STOP)], busy(3))
        batch = await outbox.get()
        assert batch is not None
        assert batch.load == busy(3)
        assert batch.events == [
            first, tokens(key("b"), 4, [40, 41]), tokens(key(), 1, [2, 3]), Finished(key(), FinishReason.STOP),
        ]

    run_virtual(story())


def test_what_was_written_is_not_joined_to_what_comes_after() -> None:
    async def story() -> None:
        outbox = LinkOutbox(max_bytes=1 << 20)
        outbox.put([tokens(key(), 0, [1])], busy(1))
        assert (await outbox.get()) is not None
        assert outbox.num_bytes == 0
        outbox.put([tokens(key(), 1, [2])], busy(1))
        batch = await outbox.get()
        assert batch is not None
        assert batch.events == [tokens(key(), 1, [2])]

    run_virtual(story())


def test_a_beat_is_a_batch_without_events_and_a_close_ends_after_the_queue() -> None:
    async def story() -> None:
        outbox = LinkOutbox(max_bytes=1 << 20)
        outbox.beat(busy(1))
        outbox.beat(busy(2))
        batch = await outbox.get()
        assert batch is not None
        assert (batch.events, batch.load) == ([], busy(2))
        outbox.put([tokens(key(), 0, [1])], busy(3))
        outbox.close()
        assert (await outbox.get()) is not None
        assert (await outbox.get()) is None

    run_virtual(story())


def test_over_the_bound_put_says_so() -> None:
    async def story() -> None:
        outbox = LinkOutbox(max_bytes=1000)
        index = 0
        while outbox.put([tokens(key(), index, [5] * 10)], busy(1)):
            index += 10
        assert 0 < index < 1000

    run_virtual(story())


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.booleans()), max_size=40))
def test_every_token_comes_out_once_in_order(steps: list[tuple[int, int, bool]]) -> None:
    """(sequence, tokens in the step, whether the stream is writable after it)."""

    async def story() -> None:
        outbox = LinkOutbox(max_bytes=1 << 20)
        sent: dict[int, list[int]] = {0: [], 1: [], 2: []}
        got: dict[int, list[int]] = {0: [], 1: [], 2: []}

        async def write() -> None:
            batch = await outbox.get()
            for event in batch.events if batch else []:
                assert isinstance(event, Tokens)
                assert event.first_index == len(got[event.key.choice])
                got[event.key.choice] += [token.token_id for token in event.tokens]

        for choice, count, writable in steps:
            values = list(range(len(sent[choice]), len(sent[choice]) + count))
            outbox.put([tokens(key(choice=choice), len(sent[choice]), values)], busy(1))
            sent[choice] += values
            if writable:
                await write()
        outbox.beat(busy(1))
        await write()
        assert got == sent

    run_virtual(story())


class Heard:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.load = Load()
        self.num_calls = 0
        self.num_overflows = 0
        self.deaths: list[BaseException] = []
        self.changed = asyncio.Event()

    def on_step(self, events: Sequence[Event], load: Load) -> None:
        self.events += events
        self.load = load
        self.num_calls += 1
        self.changed.set()

    def on_overflow(self) -> None:
        self.num_overflows += 1

    def on_death(self, error: BaseException) -> None:
        self.deaths.append(error)
        self.changed.set()

    def outbox(self, max_bytes: int = 1 << 20) -> StepOutbox:
        return StepOutbox(
            asyncio.get_running_loop(), max_bytes, on_step=self.on_step, on_overflow=self.on_overflow,
            on_death=self.on_death,
        )


async def test_steps_hop_from_the_engine_thread_to_the_loop() -> None:
    heard = Heard()
    outbox = heard.outbox()

    def engine() -> None:
        for index in range(100):
            outbox.on_step([tokens(key(), index, [index])], busy(index))

    thread = threading.Thread(target=engine)
    thread.start()
    while len(heard.events) < 100:
        heard.changed.clear()
        await heard.changed.wait()
    thread.join()
    assert heard.events == [tokens(key(), index, [index]) for index in range(100)]
    assert heard.load == busy(99)


async def test_steps_that_a_slow_loop_missed_come_in_one_hop() -> None:
    heard = Heard()
    outbox = heard.outbox()
    for index in range(10):
        outbox.on_step([tokens(key(), index, [index])], busy(index))
    await heard.changed.wait()
    assert (heard.num_calls, len(heard.events)) == (1, 10)


async def test_a_loop_that_is_far_too_slow_is_told_that_events_are_lost() -> None:
    heard = Heard()
    outbox = heard.outbox(max_bytes=1000)
    for index in range(20):
        outbox.on_step([tokens(key(), index, [index])], busy(index))
    await heard.changed.wait()
    assert (heard.num_overflows, heard.events) == (1, [])
    assert heard.load == busy(19)


async def test_death_is_told_and_a_closed_loop_is_no_trouble() -> None:
    heard = Heard()
    outbox = heard.outbox()
    error = RuntimeError("bad step")
    outbox.on_death(error)
    await heard.changed.wait()
    assert heard.deaths == [error]
    closed = asyncio.new_event_loop()
    closed.close()
    late = StepOutbox(
        closed, 1000, on_step=heard.on_step, on_overflow=heard.on_overflow, on_death=heard.on_death
    )
    late.on_step([], busy(1))
