"""What a client gets does not tell whether, where or how often its request was replayed or moved.

Every request is told twice: on a quiet day, and on a day on which workers die, drain, run out of blocks and are
replaced. Text, tokens, log probabilities, offsets, ends and usage must be the same.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from kvrelay.core.events import FailReason
from kvrelay.core.output import ChoiceFinished, Delta
from kvrelay.core.placement import Role
from kvrelay.core.request import SamplingParams
from tests.support.town import Town, TownGuest, TownWorker
from tests.support.virtual_time import run_virtual

NUM_DAYS = 12
PLAIN = SamplingParams(max_tokens=120, temperature=0.0)
Wish = tuple[SamplingParams, list[int], dict[str, Any]]


def wishes(chance: random.Random) -> list[Wish]:
    """Whatever could be counted, matched or drawn differently the second time."""
    found: list[Wish] = []
    for _ in range(8):
        sampling = replace(
            PLAIN,
            max_tokens=chance.choice([1, 2, 40, 120]),
            temperature=chance.choice([0.0, 1.0]),
            seed=chance.randrange(1000),
            logprobs=chance.choice([None, 0, 2]),
            frequency_penalty=chance.choice([0.0, 0.5]),
            stop_token_ids=tuple(chance.sample(range(256), chance.choice([0, 0, 1, 4]))),
            min_tokens=chance.choice([0, 0, 1]) and chance.randrange(1, 30),
        )
        sampling = replace(sampling, min_tokens=min(sampling.min_tokens, sampling.max_tokens))
        stop = tuple(chance.sample([*"aeiou", "th", "\n"], chance.choice([0, 0, 1, 2])))
        prompt = [chance.randrange(200) for _ in range(chance.randint(1, 60))]
        found.append((sampling, prompt, {"n": chance.choice([1, 1, 2, 3]), "stop": stop}))
    return found


def seen(guest: TownGuest) -> object:
    """All that the client can see, but for times and for how its tokens were bundled."""
    assert guest.error is None, guest.error
    choices = []
    for choice in range(guest.request.n):
        deltas = [each for each in guest.outputs if isinstance(each, Delta) and each.choice == choice]
        offsets = [offset for delta in deltas for offset in delta.text_offsets]
        ends = [each for each in guest.outputs if isinstance(each, ChoiceFinished) and each.choice == choice]
        choices.append((guest.text(choice), guest.ids(choice), guest.tokens(choice), offsets, ends))
    return choices, guest.summary.num_prompt_tokens, guest.summary.num_output_tokens


async def trouble(town: Town, chance: random.Random) -> None:
    """One misfortune after the other, each healed soon."""
    for number in range(40):
        await asyncio.sleep(chance.choice([0.02, 0.05, 0.1, 0.3]))
        worker = chance.choice(list(town.workers.values()))
        await strike(town, worker, chance.choice(["die", "die", "drain", "fail", "cut"]), number)


async def strike(town: Town, worker: TownWorker, what: str, number: int) -> None:
    engine = worker.plant.engine
    if what == "fail":
        for seq in {id(seq): seq for seq in engine.work.by_key.values()}.values():
            engine.work.fail_all(seq, FailReason.PREEMPTED, "told to")
        return
    town.add(f"{worker.record.role.value}-new-{number}", worker.record.role)
    if what == "drain":
        assert await worker.drain()
    elif what == "cut":
        town.door.leave(worker.plant.receiver.address)
        await asyncio.sleep(0.2)
    worker.end()


async def told(town: Town, wanted: list[Wish]) -> list[object]:
    guests = [town.seat(sampling, prompt, **fields) for sampling, prompt, fields in wanted]
    for guest in guests:
        await town.finish(guest)
    await town.assert_empty()
    return [seen(guest) for guest in guests]


async def quiet_day(wanted: list[Wish]) -> list[object]:
    return await told(Town(prefill=1, decode=1, worker={"num_blocks": 512}), wanted)


async def bad_day(wanted: list[Wish], chance: random.Random, num_blocks: int) -> tuple[list[object], int]:
    town = Town(prefill=2, decode=2, frame_s=0.01, worker={"num_blocks": num_blocks}, max_attempts=1000)
    guests = [town.seat(sampling, prompt, **fields) for sampling, prompt, fields in wanted]
    disturbed = asyncio.ensure_future(trouble(town, chance))
    for guest in guests:
        await town.finish(guest)
    disturbed.cancel()
    await asyncio.gather(disturbed, return_exceptions=True)
    answers = [seen(guest) for guest in guests]
    for worker in list(town.workers.values()):
        if worker.record.role is Role.DECODE:
            worker.plant.check()
    return answers, sum(guest.summary.num_attempts for guest in guests)


@pytest.mark.parametrize("num_blocks", [24, 200])
def test_a_bad_day_looks_like_a_quiet_one(num_blocks: int) -> None:
    num_wishes = num_attempts = 0
    for seed in range(NUM_DAYS):
        wanted = wishes(random.Random(seed))
        quiet = run_virtual(quiet_day(wanted))
        bad, attempts = run_virtual(bad_day(wanted, random.Random(seed), num_blocks))
        assert bad == quiet, f"day {seed}"
        num_wishes, num_attempts = num_wishes + len(wanted), num_attempts + attempts
    assert num_attempts > 1.5 * num_wishes, "these were bad days"
