"""A prompt computed here for somebody else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.core.events import FailReason, Finished, FinishReason, FirstToken
from kvrelay.core.handoff import ChoiceTokens, Commit
from kvrelay.core.ids import Choice, TransferId
from kvrelay.core.request import Leg, SamplingParams
from tests.engine.rig import GREEDY, Rig, prompt

T = TransferId("t-r")


def test_a_prompt_is_computed_pushed_and_handed_off() -> None:
    rig = Rig(max_batch_tokens=16)
    start = rig.start(prompt(40), leg=Leg.SEND)
    rig.run()
    outgoing = rig.transfer.outgoing[T]
    assert (len(outgoing.blocks), outgoing.first_block, outgoing.block_size) == (3, 0, 16)
    assert rig.transfer.progressed[T] == [16, 32]
    assert rig.transfer.commits[T] == Commit(40, 0, rig.first_tokens(start))
    assert [type(event) for event in rig.outbox.events] == [FirstToken]
    assert rig.engine.load().num_sending == 1
    assert rig.engine.load().num_held == 3
    rig.end_send(start)
    assert rig.end(start) == Finished(start.key(Choice(0)), FinishReason.HANDED_OFF)
    rig.assert_empty()


def test_prefill_hides_the_transfer_from_the_first_block_that_leaves() -> None:
    """Steps are a millisecond apart: three chunks leave one after the other, one chunk leaves when all is over."""
    rig = Rig(max_batch_tokens=16)
    chunked = rig.start(prompt(40), leg=Leg.SEND)
    rig.run()
    whole = rig.start(prompt(10, salt=5), leg=Leg.SEND, request="one chunk")
    rig.run()
    cached = rig.start(prompt(50), leg=Leg.SEND, request="a cached prefix")
    rig.run()
    hidden = {event.key.request_id: (event.prefill_ms, event.overlap_ms) for event in rig.of(FirstToken)}
    assert hidden["r"] == pytest.approx((2, 2))
    assert hidden["one chunk"] == (0, 0)
    assert hidden["a cached prefix"] == pytest.approx((1, 1))
    for start in (chunked, whole, cached):
        rig.end_send(start)
    rig.assert_empty()


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_own_prefix_hits_and_what_the_receiver_has_are_two_things(length: int, block_size: int) -> None:
    rig = Rig(num_blocks=512 // block_size, block_size=block_size)
    rig.start(prompt(length), request="warm up")
    rig.run()
    rig.outbox.take()
    cached = (length - 1) // block_size * block_size
    start = rig.start(prompt(length), leg=Leg.SEND, handoff_cached=cached)
    rig.run()
    assert rig.transfer.outgoing[T].first_block == cached // block_size
    assert rig.transfer.progressed.get(T, []) == ([cached] if cached else [])
    assert rig.of(FirstToken)[0].num_cached_tokens == cached
    assert rig.transfer.commits[T].choices == rig.first_tokens(start)
    rig.end_send(start)
    rig.assert_empty()


def test_one_token_wanted_is_nothing_to_send() -> None:
    rig = Rig()
    start = rig.start(prompt(40), replace(GREEDY, max_tokens=1), leg=Leg.SEND, handoff=None, transfer_id=None)
    rig.run()
    rig.assert_right(start)
    assert not rig.transfer.outgoing
    rig.assert_empty()


def test_choices_that_end_with_their_first_token_do_not_travel() -> None:
    rig = Rig(eos=range(0, 256, 2))
    sampling = SamplingParams(max_tokens=9, seed=1)
    start = rig.start(prompt(20), sampling, leg=Leg.SEND, n=4)
    rig.run()
    drawn = {choice: rig.output(start, choice)[0] for choice in range(4)}
    ended = {choice for choice, token in drawn.items() if token % 2 == 0}
    assert 0 < len(ended) < 4
    assert {item.choice for item in rig.transfer.commits[T].choices} == {0, 1, 2, 3} - ended
    rig.end_send(start)
    for choice in range(4):
        reason = FinishReason.STOP if choice in ended else FinishReason.HANDED_OFF
        assert rig.end(start, choice) == Finished(start.key(Choice(choice)), reason)
    rig.assert_empty()


def test_all_choices_ended_ends_the_push_without_a_commit_HND_05() -> None:
    rig = Rig(eos=range(256))
    start = rig.start(prompt(20), leg=Leg.SEND)
    rig.run()
    assert rig.end(start) == Finished(start.key(Choice(0)), FinishReason.STOP)
    assert rig.transfer.aborted == {T}
    assert not rig.transfer.commits
    assert rig.engine.load().num_draining == 2, "they may still be read"
    rig.end_send(start, "aborted")
    rig.assert_empty()


def test_a_push_that_fails_is_a_transfer_failure() -> None:
    rig = Rig()
    start = rig.start(prompt(20), SamplingParams(max_tokens=9, seed=1), leg=Leg.SEND, n=2)
    rig.run()
    rig.end_send(start, "receiver is gone")
    assert rig.failure(start, 0) is rig.failure(start, 1) is FailReason.TRANSFER
    rig.assert_empty()


def test_a_push_that_fails_before_the_prompt_is_computed_stops_the_work() -> None:
    rig = Rig(max_batch_tokens=16)
    start = rig.start(prompt(64), leg=Leg.SEND)
    rig.engine.step()
    rig.end_send(start, "refused")
    rig.run()
    assert rig.failure(start) is FailReason.TRANSFER
    assert len(rig.runner.plans) == 1
    rig.assert_empty()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_cancel_at_any_moment_keeps_lent_blocks_until_the_push_has_ended(num_steps: int) -> None:
    rig = Rig(max_batch_tokens=16)
    start = rig.start(prompt(40), leg=Leg.SEND)
    for _ in range(num_steps):
        rig.engine.step()
    rig.cancel(start.key(Choice(0)))
    assert rig.failure(start) is FailReason.CANCELLED
    assert rig.engine.load().num_draining == (3 if num_steps else 0)
    assert rig.transfer.aborted == ({T} if num_steps else set())
    if num_steps:
        rig.end_send(start, "aborted")
    rig.run()
    rig.assert_empty()


def test_the_deadline_holds_while_sending() -> None:
    rig = Rig()
    start = rig.start(prompt(40), leg=Leg.SEND, timeout_ms=1000)
    rig.run()
    rig.clock.advance(2)
    rig.engine.step()
    assert rig.failure(start) is FailReason.DEADLINE
    rig.end_send(start)
    assert rig.failure(start) is FailReason.DEADLINE
    rig.assert_empty()


def test_a_row_without_a_distribution_sends_nothing() -> None:
    rig = Rig()
    start = rig.start(prompt(40), leg=Leg.SEND)
    rig.runner.nan_keys.add(start.key(Choice(0)))
    rig.run()
    assert rig.failure(start) is FailReason.NAN_LOGITS
    assert rig.transfer.aborted == {T}
    rig.end_send(start, "aborted")
    rig.assert_empty()


@pytest.mark.parametrize("n", [1, 3])
def test_two_workers_say_what_one_would(n: int) -> None:
    sender, receiver = Rig(max_batch_tokens=16), Rig()
    sampling = SamplingParams(max_tokens=20, seed=11, logprobs=1)
    reserved = receiver.start(prompt(40), sampling, leg=Leg.RECEIVE, n=n)
    receiver.engine.step()
    sent = sender.start(prompt(40), sampling, leg=Leg.SEND, n=n)
    sender.run()
    commit = sender.transfer.commits[T]
    assert isinstance(commit.choices[0], ChoiceTokens)
    assert receiver.land(reserved, commit.choices)
    receiver.end_push(reserved)
    sender.end_send(sent)
    receiver.run()
    receiver.assert_right(reserved, n)
    sender.assert_empty()
    receiver.assert_empty()
