"""Two real workers and Model T in one process: what a request gives does not depend on the way it took."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.core.events import Committed, Finished, FinishReason, FirstToken, Refused, RefuseReason, Reserved, Tokens
from kvrelay.core.request import Start
from tests.worker.cluster import pair, plain_greedy
from tests.worker.mini_router import Story
from tests.worker.support import local_start

PROMPT = [256, *b"The relay hands over the baton after the first leg, and nobody drops a token."]


def request(
    request_id: str, prompt: list[int] = PROMPT, *, max_tokens: int = 24, choices: tuple[int, ...] = (0,)
) -> Start:
    return local_start(request_id, prompt, max_tokens=max_tokens, choices=choices)


async def test_relay_equals_local_equals_plain(model_t: Path) -> None:
    async with pair(model_t) as workers:
        for length in (1, 15, 16, 17, len(PROMPT)):
            start = request(f"local-{length}", PROMPT[:length])
            local = await workers.router.local(start)
            relayed = await workers.router.relay(request(f"relay-{length}", PROMPT[:length]))
            assert local.output() == relayed.output() == plain_greedy(model_t, start)
        await workers.assert_empty()


async def test_the_legs_tell_their_parts(model_t: Path) -> None:
    async with pair(model_t) as workers:
        story = await workers.router.relay(request("r", max_tokens=3))
        kinds = [type(event) for event in story.events]
        assert kinds[0] is Reserved
        assert kinds.count(FirstToken) == kinds.count(Committed) == 1
        assert sum(len(event.tokens) for event in story.events if isinstance(event, Tokens)) == 2
        reasons = {event.reason for event in story.events if isinstance(event, Finished)}
        assert reasons == {FinishReason.HANDED_OFF, FinishReason.LENGTH}
        await workers.assert_empty()


async def test_a_second_turn_sends_only_what_decode_lacks(model_t: Path) -> None:
    async with pair(model_t) as workers:
        first = await workers.router.relay(request("one"))
        again = [*PROMPT, *first.output(), *b" And on."]
        second = await workers.router.relay(request("two", again))
        reserved = second.events[0]
        assert isinstance(reserved, Reserved)
        assert reserved.num_cached_tokens >= len(PROMPT) // 16 * 16
        assert second.output() == plain_greedy(model_t, request("plain", again))
        await workers.assert_empty()


async def test_several_choices_are_forked_at_the_receiver(model_t: Path) -> None:
    async with pair(model_t) as workers:
        story = await workers.router.relay(request("n", choices=(0, 1, 2)))
        alone = plain_greedy(model_t, request("plain"))
        assert [story.output(choice) for choice in (0, 1, 2)] == [alone] * 3
        await workers.assert_empty()


MOMENTS = {
    "reserved": lambda story: isinstance(story.events[-1], Reserved),
    "first token": lambda story: isinstance(story.events[-1], FirstToken),
    "committed": lambda story: isinstance(story.events[-1], Committed),
    "five tokens": lambda story: len(story.tokens.get(0, {})) >= 5,
}


class Left(Exception):
    """The client has gone."""


@pytest.mark.parametrize("moment", list(MOMENTS))
async def test_a_cancel_at_any_moment_leaves_nothing(model_t: Path, moment: str) -> None:
    async with pair(model_t) as workers:
        start = request("left", max_tokens=150)

        def leave(story: Story) -> None:
            if MOMENTS[moment](story):
                raise Left

        with pytest.raises((Left, ExceptionGroup)):
            await workers.router.relay(start, leave)
        await workers.router.cancel(start)
        await workers.assert_empty()
        canary = await workers.router.relay(request("canary"))
        assert canary.output() == plain_greedy(model_t, request("plain"))


async def test_a_router_that_goes_away_leaves_nothing(model_t: Path) -> None:
    async with pair(model_t) as workers:
        start = request("gone", max_tokens=150)

        def leave(story: Story) -> None:
            if len(story.tokens.get(0, {})) >= 5:
                raise Left

        with pytest.raises(ExceptionGroup):
            await workers.router.relay(start, leave)
        for end in (workers.router.prefill, workers.router.decode):
            await end.close()
        workers.router.prefill = await type(end)(workers.prefill.record.address).attach()
        workers.router.decode = await type(end)(workers.decode.record.address).attach()
        await workers.assert_empty()


async def test_drain_lets_the_running_end_and_takes_nothing_new(model_t: Path) -> None:
    async with pair(model_t) as workers:
        start = request("last", max_tokens=60)
        await workers.router.decode.start(start)
        await workers.router.decode.next(start.request_id)
        assert await workers.decode.drain(grace_s=60.0)
        story = Story()
        while not isinstance(event := await workers.router.decode.next(start.request_id), Finished):
            story.see(event)
        assert event.reason is FinishReason.LENGTH
        await workers.router.decode.start(request("late"))
        refused = await workers.router.decode.next(request("late").request_id)
        assert isinstance(refused, Refused)
        assert refused.reason is RefuseReason.DRAINING
