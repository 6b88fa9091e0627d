"""A request computed and answered on one worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvrelay.core.events import FailReason, Finished, FinishReason, FirstToken, Refused, RefuseReason, Tokens
from kvrelay.core.ids import Choice, TokenId
from kvrelay.core.request import Leg, SamplingParams
from tests.engine.rig import GREEDY, Rig, prompt

LENGTHS = [1, 15, 16, 17, 31, 32, 33]


def test_a_request_speaks_and_finishes() -> None:
    rig = Rig()
    start = rig.start(prompt(20))
    rig.run()
    rig.assert_right(start)
    assert [type(event) for event in rig.outbox.events] == [FirstToken, *[Tokens] * 7, Finished]
    assert rig.end(start) == Finished(start.key(Choice(0)), FinishReason.LENGTH)
    rig.assert_empty()


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("length", LENGTHS)
def test_warm_is_cold_KVC_01(length: int, block_size: int) -> None:
    rig = Rig(num_blocks=512 // block_size, block_size=block_size)
    sampling = replace(GREEDY, max_tokens=20)
    cold = rig.start(prompt(length), sampling, request="cold")
    rig.run()
    warm = rig.start(prompt(length), sampling, request="warm")
    rig.run()
    rig.assert_right(cold)
    rig.assert_right(warm)
    assert rig.output(warm) == rig.output(cold)
    cached = [event.num_cached_tokens for event in rig.of(FirstToken)]
    assert cached == [0, (length - 1) // block_size * block_size]
    rig.assert_empty()


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("length", [254, 255])
def test_the_context_is_filled_to_its_last_token_KVC_01(length: int, block_size: int) -> None:
    rig = Rig(num_blocks=512 // block_size, block_size=block_size)
    start = rig.start(prompt(length), replace(GREEDY, max_tokens=10_000))
    rig.run()
    rig.assert_right(start)
    assert len(rig.output(start)) == 256 - length
    assert rig.end(start) == Finished(start.key(Choice(0)), FinishReason.LENGTH)
    rig.assert_empty()


@pytest.mark.parametrize("budget", [1, 3, 16, 17, 512])
def test_chunks_change_nothing(budget: int) -> None:
    rig = Rig(max_batch_tokens=budget)
    starts = [rig.start(prompt(length, length), request=str(length)) for length in LENGTHS]
    rig.run()
    for start in starts:
        rig.assert_right(start)
    assert max(plan.num_tokens for plan in rig.runner.plans) <= budget
    rig.assert_empty()


def test_sixteen_at_once_share_nothing_that_is_not_computed_KVC_04() -> None:
    rig = Rig(num_blocks=256, max_batch_tokens=4096)
    shared = prompt(64)
    starts = [rig.start([*shared, *prompt(9, i)], request=str(i)) for i in range(16)]
    rig.engine.step()
    assert len(rig.runner.plans[0].rows) == 16
    assert {row.num_computed for row in rig.runner.plans[0].rows} == {0}
    rig.run()
    longer = [rig.start([*shared, *prompt(25, i)], request=f"more {i}") for i in range(2)]
    rig.run()
    for start in (*starts, *longer):
        rig.assert_right(start)
    assert [event.num_cached_tokens for event in rig.of(FirstToken)][16:] == [64, 64]
    rig.assert_empty()


def test_a_prompt_in_chunks_lends_only_finished_blocks_KVC_04() -> None:
    rig = Rig(max_batch_tokens=24)
    first = rig.start(prompt(60), request="first")
    rig.engine.step()
    second = rig.start(prompt(70), request="second")
    rig.run()
    rig.assert_right(first)
    rig.assert_right(second)
    rig.assert_empty()


def test_decoding_goes_before_chunks() -> None:
    rig = Rig(max_batch_tokens=8)
    fast = rig.start(prompt(4), request="fast")
    rig.engine.step()
    slow = rig.start(prompt(40), request="slow")
    rig.engine.step()
    assert [row.num_scheduled for row in rig.runner.plans[-1].rows] == [1, 7]
    rig.run()
    rig.assert_right(fast)
    rig.assert_right(slow)


def test_n_choices_share_the_prompt_and_differ() -> None:
    rig = Rig()
    sampling = SamplingParams(max_tokens=30, seed=7)
    start = rig.start(prompt(20), sampling, n=3)
    rig.run()
    rig.assert_right(start, n=3)
    assert len({tuple(rig.output(start, choice)) for choice in range(3)}) == 3
    assert len(rig.runner.plans[0].rows) == 1
    assert sum(len(plan.copies) for plan in rig.runner.plans) == 2
    rig.assert_empty()


def test_one_of_n_choices_is_cancelled_before_and_after_the_fork() -> None:
    rig = Rig(max_batch_tokens=16)
    start = rig.start(prompt(20), SamplingParams(max_tokens=12, seed=7), n=3)
    rig.engine.step()
    rig.cancel(start.key(Choice(0)))
    rig.cancel(start.key(Choice(2)))
    rig.run()
    assert rig.output(start, 1) == rig.expected(start, 1)
    assert rig.failure(start, 0) is rig.failure(start, 2) is FailReason.CANCELLED
    assert rig.output(start, 0) == []
    rig.assert_empty()


def test_eos_and_stop_ids_end_a_choice_but_not_before_min_tokens() -> None:
    rig = Rig(eos=range(0, 256, 2))
    cases = {
        "eos": SamplingParams(max_tokens=50, temperature=0),
        "later": SamplingParams(max_tokens=50, temperature=0, min_tokens=5),
        "ignored": SamplingParams(max_tokens=50, temperature=0, ignore_eos=True),
        "stops": SamplingParams(
            max_tokens=50, temperature=0, ignore_eos=True, stop_token_ids=tuple(TokenId(i) for i in range(1, 256, 2))
        ),
    }
    starts = {name: rig.start(prompt(10), sampling, request=name) for name, sampling in cases.items()}
    rig.run()
    for start in starts.values():
        rig.assert_right(start)
    assert len(rig.output(starts["ignored"])) == 50
    assert len(rig.output(starts["later"])) > 5
    ends = {name: rig.end(start) for name, start in starts.items()}
    assert isinstance(ends["eos"], Finished)
    assert ends["eos"].reason is FinishReason.STOP
    rig.assert_empty()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_cancel_at_any_moment(num_steps: int) -> None:
    rig = Rig(max_batch_tokens=16)
    start = rig.start(prompt(40))
    for _ in range(num_steps):
        rig.engine.step()
    rig.cancel(start.key(Choice(0)))
    rig.run()
    assert rig.failure(start) is FailReason.CANCELLED
    rig.cancel(start.key(Choice(0)))
    rig.assert_empty()


def test_a_row_without_a_distribution_fails_alone() -> None:
    rig = Rig()
    bad, good = rig.start(prompt(20, 1), request="bad"), rig.start(prompt(20, 2), request="good")
    rig.runner.nan_keys.add(bad.key(Choice(0)))
    rig.run()
    assert rig.failure(bad) is FailReason.NAN_LOGITS
    rig.assert_right(good)
    rig.assert_empty()


def test_expired_work_never_runs() -> None:
    rig = Rig(max_num_seqs=1)
    first = rig.start(prompt(20), request="first", timeout_ms=100)
    second = rig.start(prompt(20), request="second", timeout_ms=50)
    rig.engine.step()
    rig.clock.advance(0.06)
    rig.engine.step()
    assert rig.failure(second) is FailReason.DEADLINE
    assert rig.output(second) == []
    rig.clock.advance(0.06)
    rig.engine.step()
    assert rig.failure(first) is FailReason.DEADLINE
    rig.assert_empty()


def test_the_queue_is_bounded_but_not_for_replays() -> None:
    rig = Rig(max_num_seqs=1, max_waiting=2)
    running = rig.start(prompt(5), request="running")
    rig.engine.step()
    waiting = [rig.start(prompt(5), request=f"waiting {i}") for i in range(2)]
    refused = rig.start(prompt(5), request="refused")
    replay = rig.start(prompt(5), request="replay", replay=True)
    rig.engine.step()
    assert rig.refusal(refused) is RefuseReason.QUEUE_FULL
    rig.run()
    for start in (running, replay, *waiting):
        rig.assert_right(start)
    ends = [event.key.request_id for event in rig.of(Finished)]
    assert ends == ["running", "replay", "waiting 0", "waiting 1"]
    rig.assert_empty()


def test_priority_goes_ahead_among_the_waiting() -> None:
    rig = Rig(max_num_seqs=1)
    rig.start(prompt(5), request="running")
    rig.engine.step()
    rig.start(prompt(5), request="low", priority=0)
    rig.start(prompt(5), request="high", priority=5)
    rig.run()
    assert [event.key.request_id for event in rig.of(Finished)] == ["running", "high", "low"]


@pytest.mark.parametrize(
    "change",
    [
        {"choices": ()},
        {"choices": (Choice(0), Choice(0))},
        {"token_ids": []},
        {"num_prompt": 0},
        {"num_prompt": 11},
        {"token_ids": [TokenId(256)] * 10},
        {"token_ids": [TokenId(-1)] * 10},
        {"choices": (Choice(0), Choice(1)), "num_prompt": 9},
        {"sampling": replace(GREEDY, max_tokens=0)},
        {"sampling": replace(GREEDY, temperature=float("nan"))},
        {"sampling": replace(GREEDY, temperature=-1.0)},
        {"sampling": replace(GREEDY, top_p=float("inf"))},
        {"sampling": replace(GREEDY, repetition_penalty=0.0)},
        {"sampling": replace(GREEDY, frequency_penalty=float("nan"))},
        {"sampling": replace(GREEDY, logprobs=21)},
        {"sampling": replace(GREEDY, logit_bias=((TokenId(256), 1.0),))},
        {"sampling": replace(GREEDY, logit_bias=((TokenId(-1), 1.0),))},
        {"sampling": replace(GREEDY, logit_bias=((TokenId(1), float("nan")),))},
        {"leg": Leg.RECEIVE},
        {"leg": Leg.SEND},
    ],
)
def test_a_malformed_start_is_refused(change: dict[str, Any]) -> None:
    rig = Rig()
    other = rig.start(prompt(20, 3), request="other")
    rig.engine.step()
    good = rig.start(prompt(10))
    rig.engine.cancel(good.key(Choice(0)))
    rig.engine.step()
    rig.outbox.take()
    bad = replace(good, **change)
    rig.engine.submit(bad)
    rig.engine.step()
    reasons = [event.reason for event in rig.of(Refused)]
    assert reasons == [RefuseReason.BAD_START] * len(bad.choices)
    rig.run()
    assert isinstance(rig.end(other), Finished)
    rig.assert_empty()


def test_the_same_key_twice_is_refused() -> None:
    rig = Rig()
    start = rig.start(prompt(10))
    rig.engine.step()
    rig.engine.submit(start)
    rig.engine.step()
    assert rig.refusal(start) is RefuseReason.BAD_START


def test_a_draining_worker_finishes_what_it_has() -> None:
    rig = Rig()
    start = rig.start(prompt(10), request="old")
    rig.engine.step()
    rig.engine.drain()
    new = rig.start(prompt(10), request="new")
    replay = rig.start(prompt(10), request="replay", replay=True)
    rig.run()
    assert rig.refusal(new) is rig.refusal(replay) is RefuseReason.DRAINING
    rig.assert_right(start)
    assert rig.engine.load().draining
    rig.assert_empty()


def test_logprobs_travel_with_their_tokens() -> None:
    rig = Rig()
    start = rig.start(prompt(10), replace(GREEDY, logprobs=2))
    rig.run()
    rig.assert_right(start)
    (first,) = rig.of(FirstToken)
    said = [first.token, *(token for event in rig.of(Tokens) for token in event.tokens)]
    model = rig.runner.model
    assert said == model.drawn_from(start.token_ids, 10, start.sampling, Choice(0), limit=rig.spec.max_sequence)
    assert len(first.token.top) == 2


@pytest.mark.parametrize("leg", Leg)
def test_output_that_ends_in_a_stop_token_is_over_at_once(leg: Leg) -> None:
    rig = Rig(eos=[7])
    for number, last in enumerate((7, 9)):
        sampling = replace(GREEDY, stop_token_ids=(TokenId(9),))
        start = rig.start([*prompt(20), TokenId(last)], sampling, request=f"{number}", leg=leg, num_prompt=20)
        rig.run()
        assert rig.outbox.events == [Finished(start.key(Choice(0)), FinishReason.STOP)]
        rig.outbox.events.clear()
    rig.assert_empty()


def test_a_stop_token_that_did_not_count_ends_nothing_later_either() -> None:
    rig = Rig(eos=[7])
    for number, (length, sampling) in enumerate(
        ((20, replace(GREEDY, ignore_eos=True)), (20, replace(GREEDY, min_tokens=1)), (21, GREEDY))
    ):
        start = rig.start([*prompt(20), TokenId(7)], sampling, request=f"{number}", num_prompt=length)
        rig.run()
        assert len(rig.output(start)) > 1
        rig.assert_right(start)
    rig.assert_empty()


@pytest.mark.parametrize(("eos", "reason"), [((), FinishReason.LENGTH), ((7,), FinishReason.STOP)])
@pytest.mark.parametrize("leg", Leg)
def test_output_that_lacks_nothing_but_the_end(leg: Leg, eos: tuple[int, ...], reason: FinishReason) -> None:
    rig = Rig(eos=eos, max_context=13)
    output = [TokenId(1), TokenId(2), TokenId(7)]
    start = rig.start([*prompt(10), *output], replace(GREEDY, max_tokens=3), leg=leg, num_prompt=10)
    rig.engine.step()
    assert rig.outbox.events == [Finished(start.key(Choice(0)), reason)]
    rig.assert_empty()
