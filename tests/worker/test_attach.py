"""Attach streams over real loopback connections, with an engine that only takes notes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvrelay.core.config import LinkSettings
from kvrelay.core.errors import Unavailable
from kvrelay.core.events import (
    Committed,
    Failed,
    FailReason,
    Finished,
    FinishReason,
    Refused,
    RefuseReason,
    Reserved,
    Token,
    Tokens,
)
from kvrelay.core.handoff import PROTOCOL_VERSION
from kvrelay.core.ids import TokenId, TransferId
from kvrelay.core.placement import Load
from kvrelay.core.request import Leg, Start
from kvrelay.pb import worker_pb2 as pb
from kvrelay.rpc.records import record_from_pb
from tests.worker.support import LINK, RECORD, SEAL, RouterEnd, attach_story, key, local_start, tokens


async def test_welcome_presents_the_worker() -> None:
    async with attach_story() as story:
        end = RouterEnd(story.address)
        story.routers.append(end)
        welcome = await end.hello()
        assert record_from_pb(welcome) == RECORD
        assert welcome.load.num_free == 64


async def test_another_protocol_is_told_both_versions() -> None:
    async with attach_story() as story:
        end = RouterEnd(story.address)
        story.routers.append(end)
        with pytest.raises(ConnectionError, match=f"protocol {PROTOCOL_VERSION}, the router 9"):
            await end.hello(protocol=9)


async def test_a_stream_begins_with_hello() -> None:
    async with attach_story() as story:
        end = RouterEnd(story.address)
        story.routers.append(end)
        await end.beat()
        assert "begins with a hello" in await end.ended()


async def test_events_go_to_the_stream_that_started_the_sequence() -> None:
    async with attach_story() as story:
        first, second = await story.router("a"), await story.router("b")
        await first.start(local_start("ra"))
        await second.start(local_start("rb", choices=(0, 1)))
        await story.inbox.until(lambda: len(story.inbox.starts) == 2)
        story.step(tokens(key("ra"), 0, [7]), tokens(key("rb"), 0, [8]), tokens(key("rb", 1), 0, [9]))
        assert await first.events() == [tokens(key("ra"), 0, [7])]
        assert await second.events() == [tokens(key("rb"), 0, [8]), tokens(key("rb", 1), 0, [9])]
        assert second.num_event_messages == 1


async def test_reserved_says_where_to_push() -> None:
    async with attach_story() as story:
        router = await story.router()
        await router.start(local_start())
        await story.inbox.until(lambda: len(story.inbox.starts) == 1)
        story.step(Reserved(key(), 16))
        assert await router.events() == [Reserved(key(), 16)]
        (receiver,) = router.receivers[key()]
        assert (receiver.address, receiver.incarnation) == (RECORD.push_address, RECORD.incarnation)


async def test_beats_carry_load_and_the_age_of_the_engine() -> None:
    async with attach_story(engine_age_ms=1234.0) as story:
        router = await story.router()
        story.step(load=Load(num_blocks=64, num_free=10, num_held=54))
        message = await router.read()
        while message is not None and message.beat.num_held == 0:
            message = await router.read()
        assert message is not None
        assert message.beat.engine_age_ms == 1234.0


async def test_events_of_nobody_are_dropped() -> None:
    async with attach_story() as story:
        router = await story.router()
        await router.start(local_start("mine"))
        await story.inbox.until(lambda: len(story.inbox.starts) == 1)
        story.step(tokens(key("mine", attempt=1), 0, [1]), tokens(key("other"), 0, [2]))
        story.step(tokens(key("mine"), 0, [3]))
        assert await router.events() == [tokens(key("mine"), 0, [3])]


async def test_a_terminal_event_closes_the_sequence() -> None:
    async with attach_story() as story:
        router = await story.router()
        await router.start(local_start())
        await story.inbox.until(lambda: len(story.inbox.starts) == 1)
        assert story.service.num_open == 1
        story.step(Finished(key(), FinishReason.LENGTH))
        assert await router.events() == [Finished(key(), FinishReason.LENGTH)]
        assert story.service.num_open == 0


async def test_a_start_that_comes_twice_runs_once() -> None:
    async with attach_story() as story:
        router = await story.router()
        await router.start(local_start())
        await router.start(local_start())
        await router.start(local_start("last"))
        await story.inbox.until(lambda: len(story.inbox.starts) == 2)
        assert [start.request_id for start in story.inbox.starts] == ["r", "last"]


async def test_a_start_older_than_the_open_one_is_refused() -> None:
    async with attach_story() as story:
        router = await story.router()
        await router.start(local_start(attempt=3))
        await router.start(local_start(attempt=2))
        (event,) = await router.events()
        assert isinstance(event, Refused)
        assert (event.key, event.reason) == (key(attempt=2), RefuseReason.BAD_START)
        assert [start.attempt for start in story.inbox.starts] == [3]


async def test_a_start_that_makes_no_sense_is_refused() -> None:
    async with attach_story() as story:
        router = await story.router()
        await router.call.write(pb.RouterMessage(start=pb.Start(request_id="r", choices=[0, 1], leg=pb.LEG_LOCAL)))
        events = await router.events()
        assert [event.key for event in events] == [key(), key(choice=1)]
        assert all(isinstance(event, Refused) and event.reason is RefuseReason.BAD_START for event in events)
        assert story.inbox.starts == []


async def test_cancel_names_one_choice_or_all_of_its_own() -> None:
    async with attach_story() as story:
        router, stranger = await story.router("a"), await story.router("b")
        await router.start(local_start(choices=(0, 1, 2)))
        await story.inbox.until(lambda: len(story.inbox.starts) == 1)
        await router.cancel(key(), 1)
        await story.inbox.until(lambda: len(story.inbox.cancelled) == 1)
        await stranger.cancel(key())
        await stranger.start(local_start("fence"))
        await story.inbox.until(lambda: len(story.inbox.starts) == 2)
        await router.cancel(key())
        await story.inbox.until(lambda: len(story.inbox.cancelled) == 4)
        assert story.inbox.cancelled == [key(choice=1), key(), key(choice=1), key(choice=2)]


async def test_the_end_of_a_stream_aborts_what_it_carried() -> None:
    async with attach_story() as story:
        router, other = await story.router("a"), await story.router("b")
        await router.start(local_start("gone", choices=(0, 1)))
        await other.start(local_start("stays"))
        await story.inbox.until(lambda: len(story.inbox.starts) == 2)
        await router.close()
        await story.inbox.until(lambda: len(story.inbox.cancelled) == 2)
        assert story.inbox.cancelled == [key("gone"), key("gone", 1)]
        assert story.service.num_open == 1


async def test_a_router_that_comes_again_finds_its_old_work_aborted() -> None:
    async with attach_story() as story:
        old = await story.router()
        await old.start(local_start("old"))
        await story.inbox.until(lambda: len(story.inbox.starts) == 1)
        new = await story.router()
        assert story.inbox.cancelled == [key("old")]
        await new.start(local_start("old", attempt=1))
        await story.inbox.until(lambda: len(story.inbox.starts) == 2)
        assert "attached again" in await old.ended()
        story.step(tokens(key("old"), 0, [1]), tokens(key("old", attempt=1), 0, [2]))
        assert await new.events() == [tokens(key("old", attempt=1), 0, [2])]


async def test_silence_ends_the_stream() -> None:
    async with attach_story(replace(LINK, beat_s=0.01, silence_s=0.05)) as story:
        router = await story.router()
        await router.start(local_start())
        assert "said nothing" in await router.ended()
        assert story.inbox.cancelled == [key()]


async def test_a_router_that_does_not_read_loses_its_stream() -> None:
    async with attach_story(LinkSettings(beat_s=0.05, silence_s=60.0, max_outbox_bytes=20_000)) as story:
        slow, quick = await story.router("slow"), await story.router("quick")
        await slow.start(local_start("s"))
        await quick.start(local_start("q"))
        await story.inbox.until(lambda: len(story.inbox.starts) == 2)
        wide = tuple(Token(TokenId(7), -1.0, tuple((TokenId(rank), -2.0) for rank in range(20))) for _ in range(50))
        index = 0
        while not story.inbox.cancelled:
            story.step(Tokens(key("s"), index, wide), tokens(key("q"), index, [1]))
            assert await quick.events() == [tokens(key("q"), index, [1])]
            index += len(wide)
            await quick.beat()
        assert story.inbox.cancelled == [key("s")]
        assert story.service.num_open == 1


async def test_the_death_of_the_engine_fails_every_sequence() -> None:
    async with attach_story() as story:
        first, second = await story.router("a"), await story.router("b")
        await first.start(local_start("ra", choices=(0, 1)))
        await second.start(local_start("rb"))
        await story.inbox.until(lambda: len(story.inbox.starts) == 2)
        story.service.fail_all("the engine is gone")
        expected = [Failed(key("ra", choice), FailReason.ENGINE, "the engine is gone") for choice in (0, 1)]
        assert await first.events() == expected
        assert await second.events() == [Failed(key("rb"), FailReason.ENGINE, "the engine is gone")]
        assert "going down" in await first.ended()
        late = RouterEnd(story.address, "c")
        story.routers.append(late)
        with pytest.raises(ConnectionError, match="the engine is gone"):
            await late.hello()


async def test_the_death_of_the_engine_reaches_those_behind_a_router_that_is_cut_off() -> None:
    async with attach_story(replace(LINK, max_outbox_bytes=150)) as story:
        crowded, other = await story.router("a"), await story.router("b")
        await crowded.start(local_start("ra", choices=(0, 1)))
        await other.start(local_start("rb"))
        await story.inbox.until(lambda: len(story.inbox.starts) == 2)
        story.service.fail_all("the engine is gone")
        assert await other.events() == [Failed(key("rb"), FailReason.ENGINE, "the engine is gone")]
        assert "reads too slowly" in await crowded.ended()


async def test_a_hello_that_comes_after_the_death_of_the_engine_is_refused() -> None:
    class Slow:
        """A stream whose router says hello while the engine dies."""

        async def read(self) -> pb.RouterMessage:
            story.service.fail_all("the engine is gone")
            return pb.RouterMessage(hello=pb.Hello(router_id="late", protocol=PROTOCOL_VERSION))

    async with attach_story() as story:
        with pytest.raises(Unavailable, match="the engine is gone"):
            await story.service.Attach(object(), Slow())


async def test_close_writes_what_is_queued_first() -> None:
    async with attach_story() as story:
        router = await story.router()
        await router.start(local_start())
        await story.inbox.until(lambda: len(story.inbox.starts) == 1)
        story.step(Finished(key(), FinishReason.STOP))
        await story.service.close(grace_s=5.0)
        assert await router.events() == [Finished(key(), FinishReason.STOP)]
        assert "going down" in await router.ended()


def receive_start(request_id: str, **extra: Any) -> Start:
    start = local_start(request_id, **extra)
    return replace(start, leg=Leg.RECEIVE, transfer_id=TransferId(f"t-{request_id}"), cache_salt=b"acme")


async def test_a_reservation_gets_a_handle_of_its_own() -> None:
    async with attach_story() as story:
        router = await story.router()
        for name in ("a", "b"):
            await router.start(receive_start(name, choices=(0, 1)))
        await story.inbox.until(lambda: len(story.inbox.starts) == 2)
        story.step(Reserved(key("a"), 0), Reserved(key("b"), 0))
        await router.events()
        for name, other in (("a", "b"), ("b", "a")):
            (receiver,) = router.receivers[key(name)]
            assert SEAL.fault(receiver.handle, TransferId(f"t-{name}"), b"acme") == ""
            assert SEAL.fault(receiver.handle, TransferId(f"t-{other}"), b"acme") != ""


async def test_one_router_cannot_take_every_reservation() -> None:
    """Over its share it is refused for now, replays are not, another router is not, and a commit makes room."""
    async with attach_story(max_reservations=2) as story:
        router, other = await story.router("a"), await story.router("b")
        for name in ("one", "two", "three"):
            await router.start(receive_start(name, choices=(0, 1)))
        refused = await router.events()
        assert [(event.key, type(event)) for event in refused] == [(key("three", c), Refused) for c in (0, 1)]
        assert isinstance(refused[0], Refused)
        assert (refused[0].reason, refused[0].retry_after_ms > 0) == (RefuseReason.NO_ROOM, True)
        await router.start(receive_start("again", replay=True))
        await other.start(receive_start("theirs"))
        await router.start(local_start("local"))
        await story.inbox.until(lambda: len(story.inbox.starts) == 5)
        assert story.service.num_open == 7

        over = Failed(key("again"), FailReason.CANCELLED, "")
        story.step(Committed(key("one"), 0, ()), Committed(key("one", 1), 0, ()), over)
        await router.events()
        await router.start(receive_start("three"))
        await story.inbox.until(lambda: len(story.inbox.starts) == 6)
