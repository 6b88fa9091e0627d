"""Exact mode (DESIGN §1.13): the same tokens and logprobs, to the last bit, however a request was served.

Alone or among 32, prompts whole or in chunks of 16, from the prefix cache or not, on one worker or relayed, resumed
after any token. With seeds and penalties; in bfloat16, where another order of additions would show at once.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.core.config import Config
from kvrelay.core.events import Token
from kvrelay.core.ids import RequestId, TokenId
from kvrelay.core.output import Delta, GenerateRequest
from kvrelay.core.request import SamplingParams
from tests.stories.house import House, house
from tests.support.tiny import write_model_t
from tests.worker.cluster import CONFIG
from tests.worker.support import ids

NUM_TOKENS = 20
TEXT = "Whoever carries the baton runs on with the same step as the one before, and nobody in the stands can tell. " * 2
PROMPTS = [[256, *TEXT.encode()[5 * i : 5 * i + 3 * i]] for i in range(32)]
"""1 to 94 tokens: below, at and above the edges of blocks and chunks of 16."""
WAYS = [
    SamplingParams(NUM_TOKENS, temperature=0.0, logprobs=3, ignore_eos=True),
    SamplingParams(NUM_TOKENS, temperature=1.0, seed=11, logprobs=3, ignore_eos=True),
    SamplingParams(NUM_TOKENS, temperature=0.8, top_p=0.9, seed=5, logprobs=0, frequency_penalty=0.5, ignore_eos=True),
    SamplingParams(NUM_TOKENS, temperature=0.7, top_k=20, seed=9, repetition_penalty=1.2, logprobs=1, ignore_eos=True),
]


@pytest.fixture(scope="module")
def model_t(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_t(tmp_path_factory.mktemp("exact") / "t")


def settings(*, chunk: int) -> Config:
    return replace(
        CONFIG,
        model=replace(CONFIG.model, dtype="bfloat16", numerics="exact"),
        engine=replace(CONFIG.engine, max_batch_tokens=chunk, num_blocks=512),
        placement=replace(CONFIG.placement, always_relay=True),
    )


def ask(number: int, resume: tuple[TokenId, ...] = ()) -> GenerateRequest:
    name = RequestId(f"r{number}-{len(resume)}")
    return GenerateRequest(name, ids(PROMPTS[number]), WAYS[number % len(WAYS)], resume=resume)


async def tokens(of: House, request: GenerateRequest) -> list[Token]:
    """Id, logprob and alternatives of every token, all compared with `==`."""
    outputs = [output async for output in of.router.generate(request)]
    return [token for output in outputs if isinstance(output, Delta) for token in output.tokens]


async def test_bits_depend_on_nothing_but_the_request(model_t: Path) -> None:
    async with house(model_t, "mixed", config=settings(chunk=512)) as alone:
        expected = [await tokens(alone, ask(i)) for i in range(len(PROMPTS))]
        assert all(len(answer) == NUM_TOKENS for answer in expected)
        assert [await tokens(alone, ask(i)) for i in (7, 31)] == [expected[7], expected[31]], "from the prefix cache"
    async with house(model_t, "prefill", "decode", config=settings(chunk=16)) as relay:
        for _ in ("cold", "from the prefix cache"):
            assert await asyncio.gather(*(tokens(relay, ask(i)) for i in range(len(PROMPTS)))) == expected


async def test_a_resumed_stream_goes_on_with_the_same_bits(model_t: Path) -> None:
    async with house(model_t, "prefill", "decode", config=settings(chunk=16)) as relay:
        for number in (10, 17, 22, 31):
            whole = await tokens(relay, ask(number))
            given = tuple(token.token_id for token in whole)
            rests = [tokens(relay, ask(number, given[:count])) for count in range(1, NUM_TOKENS)]
            assert await asyncio.gather(*rests) == [whole[count:] for count in range(1, NUM_TOKENS)]
