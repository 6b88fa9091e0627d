"""When blocks are scarce: what never fits, what waits, who goes first, and that a replay says the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.core.events import Failed, FailReason, Finished, FinishReason, RefuseReason
from kvrelay.core.ids import Choice, TokenId
from kvrelay.core.request import Leg, SamplingParams, Start
from tests.engine.rig import GREEDY, Rig, prompt


def run_with_replays(rig: Rig, starts: list[Start]) -> tuple[dict[str, list[TokenId]], int]:
    """Plays a router: whatever is preempted comes again as a longer prompt. Returns outputs and number of replays."""
    output: dict[str, list[TokenId]] = {}
    num_replays = 0
    open_starts = {start.request_id: start for start in starts}
    for _ in range(2000):
        rig.clock.advance(0.001)
        is_busy = rig.engine.step()
        for event in rig.outbox.events:
            if isinstance(event, Finished | Failed):
                start = open_starts.pop(event.key.request_id)
                output[start.request_id] = rig.output(start)
                if isinstance(event, Failed):
                    assert event.reason is FailReason.PREEMPTED
                    again = rig.replay(start, Choice(0), output[start.request_id])
                    open_starts[start.request_id] = again
                    num_replays += 1
                    rig.engine.submit(again)
        rig.outbox.events = [
            event for event in rig.outbox.events if event.key.request_id in open_starts
            and event.key.attempt == open_starts[event.key.request_id].attempt
        ]  # fmt: skip
        if not is_busy and not open_starts:
            return output, num_replays
    raise AssertionError("they never finish")


def test_a_request_of_exactly_the_pool_completes_and_one_more_is_refused_SCH_01() -> None:
    rig = Rig(num_blocks=4)
    exact = rig.start(prompt(33), replace(GREEDY, max_tokens=31), request="exact")
    never = rig.start(prompt(64), request="never")
    short = [rig.start(prompt(5, i), request=f"short {i}") for i in range(5)]
    rig.engine.step()
    assert rig.refusal(never) is RefuseReason.NEVER_FITS
    rig.run()
    for start in (exact, *short):
        rig.assert_right(start)
    rig.assert_empty()


def test_never_fits_is_said_at_once_for_every_leg_SCH_01() -> None:
    rig = Rig(num_blocks=4)
    for leg, longest in ((Leg.LOCAL, 63), (Leg.RECEIVE, 63), (Leg.SEND, 64)):
        fits = rig.start(prompt(longest), request=f"fits {leg}", leg=leg)
        never = rig.start(prompt(longest + 1), request=f"never {leg}", leg=leg)
        rig.engine.step()
        assert rig.refusal(never) is RefuseReason.NEVER_FITS
        rig.cancel(fits.key(Choice(0)))
        if leg is Leg.RECEIVE:
            rig.end_push(fits, "closed")
        if leg is Leg.SEND:
            rig.end_send(fits, "closed")
    too_many = rig.start(prompt(40), n=9, request="many")
    rig.engine.step()
    assert rig.refusal(too_many) is RefuseReason.NEVER_FITS
    rig.assert_empty()


def test_many_choices_run_with_a_smaller_allowance_than_usual() -> None:
    rig = Rig(num_blocks=8, growth_tokens=64)
    start = rig.start(prompt(16), SamplingParams(max_tokens=10, seed=3), n=4)
    rig.run()
    rig.assert_right(start, n=4)
    rig.assert_empty()


def test_growth_past_the_pool_ends_with_length_SCH_01() -> None:
    rig = Rig(num_blocks=4, growth_tokens=16)
    start = rig.start(prompt(20), replace(GREEDY, max_tokens=1000))
    rig.run()
    rig.assert_right(start)
    assert len(rig.output(start)) == 44
    assert rig.end(start) == Finished(start.key(Choice(0)), FinishReason.LENGTH)
    rig.assert_empty()


def test_new_work_leaves_the_watermark_and_a_replay_may_use_it() -> None:
    rig = Rig(num_blocks=10, watermark_fraction=0.2, growth_tokens=64)
    first = rig.start(prompt(60), replace(GREEDY, max_tokens=50), request="first")
    rig.engine.step()
    new = rig.start(prompt(20, 1), request="new")
    rig.engine.step()
    assert rig.engine.load().num_waiting == 1
    replay = rig.start(prompt(20, 2), request="replay", replay=True)
    rig.engine.step()
    assert {row.key.request_id for row in rig.runner.plans[-1].rows} == {"first", "replay"}
    rig.run()
    for start in (first, new, replay):
        rig.assert_right(start)
    rig.assert_empty()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=76, temperature=0.0),
        SamplingParams(max_tokens=76, seed=5, frequency_penalty=0.5, logprobs=2),
    ],
)
@pytest.mark.parametrize("growth", [1, 16, 64])
def test_preempted_and_replayed_is_undisturbed_SCH_02(sampling: SamplingParams, growth: int) -> None:
    rig = Rig(num_blocks=8, growth_tokens=growth)
    starts = [rig.start(prompt(20, i), sampling, request=str(i)) for i in range(2)]
    output, num_replays = run_with_replays(rig, starts)
    for start in starts:
        assert output[start.request_id] == rig.expected(start)
    assert num_replays > 0 or growth == 64
    rig.assert_empty()


@pytest.mark.parametrize("num_said", [0, 1, 11, 12, 13, 28, 39])
@pytest.mark.parametrize("warm", [True, False])
def test_a_replay_from_any_index_says_the_rest_SCH_02(num_said: int, warm: bool) -> None:
    rig = Rig()
    start = rig.start(prompt(20), SamplingParams(max_tokens=40, seed=5, frequency_penalty=0.5))
    rig.run()
    whole = rig.output(start)
    other = rig if warm else Rig()
    replay = rig.replay(start, Choice(0), whole[:num_said])
    other.outbox.take()
    other.engine.submit(replay)
    other.run()
    assert other.output(replay) == whole
    assert isinstance(other.end(replay), Finished)
    other.assert_empty()


def test_the_newest_goes_first() -> None:
    rig = Rig(num_blocks=8, growth_tokens=1, watermark_fraction=0.0)
    sampling = replace(GREEDY, max_tokens=60)
    starts = [rig.start(prompt(20, i), sampling, request=str(i)) for i in range(3)]
    rig.run()
    assert rig.failure(starts[2]) is FailReason.PREEMPTED
    rig.assert_right(starts[0])
    rig.assert_empty()


def test_a_preempted_sequence_leaves_its_full_blocks_in_the_cache() -> None:
    rig = Rig(num_blocks=8, growth_tokens=1, watermark_fraction=0.0)
    sampling = replace(GREEDY, max_tokens=40)
    starts = [rig.start(prompt(20, i), sampling, request=str(i)) for i in range(3)]
    while not rig.of(Failed):
        rig.engine.step()
    assert rig.engine.load().num_cached + rig.engine.load().num_free >= 1
    rig.run()
    rig.assert_right(starts[0])
    rig.assert_empty()


def test_rows_of_a_step_are_bounded_by_admission() -> None:
    rig = Rig(num_blocks=256, max_num_seqs=4)
    starts = [rig.start(prompt(20, i), SamplingParams(max_tokens=9, seed=i), request=str(i), n=3) for i in range(4)]
    rig.run()
    assert max(len(plan.rows) for plan in rig.runner.plans) <= 4
    for start in starts:
        rig.assert_right(start, n=3)
    too_many = rig.start(prompt(20), request="too many", n=5)
    rig.engine.step()
    assert rig.refusal(too_many) is RefuseReason.NEVER_FITS
    rig.assert_empty()
