"""A reservation, and the KV that arrives for it or does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.core.events import (
    Committed,
    Failed,
    FailReason,
    Finished,
    FinishReason,
    FirstToken,
    Refused,
    RefuseReason,
    Reserved,
    Token,
    Tokens,
)
from kvrelay.core.handoff import ChoiceTokens, Commit
from kvrelay.core.ids import Choice, TokenId, TransferId
from kvrelay.core.request import Leg, SamplingParams, Start
from tests.engine.rig import GREEDY, Rig, prompt

LENGTHS = [1, 15, 16, 17, 31, 32, 33]


def reserve(rig: Rig, length: int = 40, sampling: SamplingParams = GREEDY, **more: object) -> Start:
    start = rig.start(prompt(length), sampling, leg=Leg.RECEIVE, **more)  # type: ignore[arg-type]
    rig.engine.step()
    return start


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("length", LENGTHS)
def test_reserved_committed_and_finished(length: int, block_size: int) -> None:
    rig = Rig(num_blocks=512 // block_size, block_size=block_size)
    start = reserve(rig, length)
    assert rig.outbox.take() == [Reserved(start.key(Choice(0)), 0)]
    assert rig.engine.load().num_reserved == 1
    assert rig.land(start, rig.first_tokens(start))
    rig.end_push(start)
    rig.run()
    rig.assert_right(start)
    assert [type(event) for event in rig.outbox.events] == [Committed, *[Tokens] * 7, Finished]
    rig.assert_empty()


def test_only_blocks_that_are_not_here_have_to_travel() -> None:
    rig = Rig()
    rig.start(prompt(40), request="local")
    rig.run()
    start = reserve(rig, 32, request="r")
    assert rig.of(Reserved)[0].num_cached_tokens == 16
    expected = rig.transfer.expected[TransferId("t-r")]
    assert (expected.first_block, len(expected.blocks)) == (1, 1)
    assert rig.land(start, rig.first_tokens(start))
    rig.end_push(start)
    rig.run()
    rig.assert_right(start)
    rig.assert_empty()


def test_received_blocks_are_matched_after_the_commit_only() -> None:
    rig = Rig()
    start = reserve(rig, 40)
    early = rig.start(prompt(40), request="early")
    rig.run()
    late = rig.start(prompt(40, 9), request="other", leg=Leg.RECEIVE)
    rig.engine.step()
    assert rig.land(late, rig.first_tokens(late))
    after = rig.start(prompt(40, 9), request="after")
    rig.run()
    cached = {event.key.request_id: event.num_cached_tokens for event in rig.of(FirstToken)}
    assert cached == {"early": 0, "after": 32}
    for done in (early, late, after):
        rig.assert_right(done)
    rig.end_push(late)
    rig.cancel(start.key(Choice(0)))
    rig.end_push(start, "closed")
    rig.assert_empty()


def test_n_choices_arrive_as_one_prompt() -> None:
    rig = Rig()
    sampling = SamplingParams(max_tokens=30, seed=3)
    start = reserve(rig, 20, sampling, n=3)
    assert rig.land(start, rig.first_tokens(start, 3))
    rig.end_push(start)
    rig.run()
    rig.assert_right(start, n=3)
    rig.assert_empty()


def test_a_choice_that_ended_at_the_sender_ends_here_as_cancelled() -> None:
    rig = Rig()
    start = reserve(rig, 20, SamplingParams(max_tokens=9, seed=3), n=2)
    assert rig.land(start, rig.first_tokens(start, 2)[1:])
    rig.end_push(start)
    rig.run()
    assert rig.output(start, 1) == rig.expected(start, 1)
    heard = [event for event in rig.outbox.events if event.key.choice == 0 and not isinstance(event, Reserved)]
    assert [(type(event), getattr(event, "reason", None)) for event in heard] == [(Failed, FailReason.CANCELLED)]
    rig.assert_empty()


def test_a_committed_token_can_be_the_last() -> None:
    rig = Rig(eos=[5])
    start = reserve(rig, 20)
    assert rig.land(start, [ChoiceTokens(Choice(0), (Token(TokenId(5)),))])
    assert rig.of(Finished) == [Finished(start.key(Choice(0)), FinishReason.STOP)]
    assert rig.engine.load().num_draining == 2, "the transfer still has its pins"
    rig.end_push(start)
    rig.assert_empty()


def test_the_received_token_can_fill_the_context() -> None:
    rig = Rig()
    start = reserve(rig, 255, replace(GREEDY, max_tokens=100))
    assert rig.land(start, rig.first_tokens(start))
    rig.end_push(start)
    assert rig.end(start) == Finished(start.key(Choice(0)), FinishReason.LENGTH)
    rig.assert_empty()


def test_a_cancelled_reservation_drains_until_the_push_has_ended_HND_01() -> None:
    rig = Rig(num_blocks=4)
    start = reserve(rig, 48)
    rig.cancel(start.key(Choice(0)))
    assert rig.failure(start) is FailReason.CANCELLED
    assert rig.transfer.closed == {start.transfer_id}
    load = rig.engine.load()
    assert (load.num_draining, load.num_held, load.num_reserved) == (3, 0, 0)
    other = rig.start(prompt(30), request="other")
    rig.engine.step()
    assert rig.runner.plans == [], "the late write would have hit this request"
    rig.end_push(start, "closed")
    rig.run()
    rig.assert_right(other)
    rig.assert_empty()


def test_one_of_two_reserved_choices_is_cancelled() -> None:
    rig = Rig()
    start = reserve(rig, 20, SamplingParams(max_tokens=9, seed=3), n=2)
    rig.cancel(start.key(Choice(0)))
    assert not rig.transfer.closed
    assert rig.land(start, rig.first_tokens(start, 2))
    rig.end_push(start)
    rig.run()
    assert rig.failure(start, 0) is FailReason.CANCELLED
    assert rig.output(start, 1) == rig.expected(start, 1)
    rig.assert_empty()


def test_what_lands_after_a_cancel_is_turned_away() -> None:
    rig = Rig()
    start = reserve(rig)
    rig.engine.cancel(start.key(Choice(0)))
    assert not rig.land(start, rig.first_tokens(start))
    rig.end_push(start, "refused")
    assert rig.failure(start) is FailReason.CANCELLED
    rig.assert_empty()


@pytest.mark.parametrize("moment", ["running", "after the end of the push"])
def test_cancel_of_a_committed_sequence(moment: str) -> None:
    rig = Rig()
    start = reserve(rig)
    assert rig.land(start, rig.first_tokens(start))
    if moment == "after the end of the push":
        rig.end_push(start)
    rig.cancel(start.key(Choice(0)))
    assert rig.failure(start) is FailReason.CANCELLED
    if moment == "running":
        assert rig.engine.load().num_draining == 3
        rig.end_push(start)
    rig.assert_empty()


def test_a_wrong_commit_is_turned_away() -> None:
    rig = Rig()
    start = reserve(rig, 40)
    token = (Token(TokenId(1)),)
    assert not rig.land(start, rig.first_tokens(start), num_tokens=39)
    assert not rig.land(start, [ChoiceTokens(Choice(1), token)])
    assert not rig.land(start, [ChoiceTokens(Choice(0), token), ChoiceTokens(Choice(0), token)])
    assert not rig.land(start, [ChoiceTokens(Choice(0), ())])
    rig.end_push(start, "refused")
    assert rig.failure(start) is FailReason.TRANSFER
    replies: list[bool] = []
    rig.engine.landed(TransferId("unknown"), Commit(1, 1, ()), replies.append)
    rig.engine.push_ended(TransferId("unknown"), "")
    rig.engine.send_ended(TransferId("unknown"), "")
    rig.engine.step()
    assert replies == [False]
    rig.assert_empty()


def test_a_push_that_breaks_fails_the_reservation() -> None:
    rig = Rig()
    start = reserve(rig, 40, SamplingParams(max_tokens=9, seed=3), n=2)
    rig.end_push(start, "stalled")
    assert rig.failure(start, 0) is rig.failure(start, 1) is FailReason.TRANSFER
    assert rig.of(Failed)[0].message == "stalled"
    rig.assert_empty()


def test_a_reservation_has_a_deadline() -> None:
    rig = Rig()
    start = reserve(rig, 40, timeout_ms=1000)
    rig.clock.advance(1.1)
    rig.engine.step()
    assert rig.failure(start) is FailReason.DEADLINE
    assert rig.transfer.closed == {start.transfer_id}
    rig.end_push(start, "closed")
    rig.assert_empty()


def test_new_work_is_refused_for_room_and_a_replay_waits() -> None:
    rig = Rig(num_blocks=4, growth_tokens=16)
    first = reserve(rig, 40, request="first")
    new = reserve(rig, 20, request="new")
    assert rig.refusal(new) is RefuseReason.NO_ROOM
    assert rig.of(Refused)[0].retry_after_ms > 0
    replay = reserve(rig, 20, request="replay", replay=True)
    assert rig.engine.load().num_waiting == 1
    assert len(rig.of(Reserved)) == 1
    rig.cancel(first.key(Choice(0)))
    rig.end_push(first, "closed")
    assert len(rig.of(Reserved)) == 2
    assert rig.land(replay, rig.first_tokens(replay))
    rig.end_push(replay)
    rig.run()
    rig.assert_right(replay)
    rig.assert_empty()


def test_new_work_does_not_overtake_a_waiting_replay() -> None:
    rig = Rig(num_blocks=6, growth_tokens=16)
    first = reserve(rig, 40, request="first")
    replay = reserve(rig, 60, request="replay", replay=True, timeout_ms=1000)
    small = reserve(rig, 1, request="small")
    assert rig.refusal(small) is RefuseReason.NO_ROOM
    rig.clock.advance(2)
    rig.engine.step()
    assert rig.failure(replay) is FailReason.DEADLINE
    small = reserve(rig, 1, request="small again")
    for start in (first, small):
        rig.cancel(start.key(Choice(0)))
        rig.end_push(start, "closed")
    rig.assert_empty()


def test_open_reservations_are_bounded() -> None:
    rig = Rig(max_reservations=1)
    first, second = reserve(rig, request="first"), reserve(rig, request="second")
    assert rig.refusal(second) is RefuseReason.NO_ROOM
    again = replace(first, request_id=second.request_id)
    rig.outbox.take()
    rig.engine.submit(again)
    rig.engine.step()
    assert rig.refusal(again) is RefuseReason.BAD_START, "a transfer id accepts one push, ever"
    rig.end_push(first, "gone")
    rig.assert_empty()
