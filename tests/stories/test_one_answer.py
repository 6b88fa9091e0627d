"""One answer, whatever its way: relayed, on one worker, or by transformers itself. Model T in float32."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvrelay.core.config import PlacementSettings
from kvrelay.core.ids import TokenId
from kvrelay.core.placement import Hints, Placement, PlacementRequest, Snapshot
from kvrelay.placement.policy import place
from kvrelay.router import router as router_module
from tests.stories.house import NUM_TOKENS, House, house
from tests.support.empty import assert_worker_is_empty
from tests.support.tiny import write_model_t
from tests.worker.cluster import plain_greedy
from tests.worker.support import local_start

TEXT = "Prefill runs the first leg of a request and hands the baton over; decode runs the rest of it, to the end."
PROMPTS = [[256, *TEXT.encode()[3 * i : 3 * i + 1 + 4 * i]] for i in range(20)]
"""1 to 47 characters behind a BOS: below, at and above the edges of blocks of 16."""


@pytest.fixture(scope="module")
def model_t(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_t(tmp_path_factory.mktemp("model") / "t")


def never_local(
    request: PlacementRequest, snapshot: Snapshot, hints: Hints, settings: PlacementSettings
) -> Placement | None:
    """As if decode workers computed prompts hopelessly slowly: what a loaded machine measures is left to chance."""
    views = tuple(
        replace(view, load=replace(view.load, prefill_tokens_per_s=1e-3 if view.record.role.can_decode else 1e6))
        for view in snapshot.workers
    )
    return place(request, Snapshot(views), hints, settings)


@pytest.fixture(autouse=True)
def relay_wherever_there_is_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "place", never_local)


async def test_twenty_prompts_give_what_transformers_gives(model_t: Path) -> None:
    async with house(model_t, "prefill", "decode") as relay:
        answers = await asyncio.gather(*(relay.greedy(prompt, i) for i, prompt in enumerate(PROMPTS)))
        assert {summary.mode for _, summary in answers} == {"relay"}
    reference = AutoModelForCausalLM.from_pretrained(model_t, dtype=torch.float32).eval()
    for prompt, (output, _) in zip(PROMPTS, answers, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
        )[0, len(prompt) :]
        assert output == expected.tolist()
    alone = local_start("alone", PROMPTS[-1], max_tokens=NUM_TOKENS)
    ignoring = replace(alone, sampling=replace(alone.sampling, ignore_eos=True))
    assert plain_greedy(model_t, ignoring) == answers[-1][0]


async def bodies(of: House) -> list[tuple[str, dict[str, Any]]]:
    """Requests in which the first token, a stop, or a choice could be treated differently by two workers."""
    first, second, third = (TokenId(i) for i in (await of.greedy(PROMPTS[7], 0))[0][:3])
    prompt = {"prompt": PROMPTS[7], "temperature": 0, "max_tokens": 12}
    chat = {"messages": [{"role": "user", "content": "hand it over"}], "max_tokens": 12, "seed": 5}
    completions = [
        {**prompt, "logprobs": 3}, {**prompt, "max_tokens": 1, "logprobs": 0}, {**prompt, "max_tokens": 0},
        {**prompt, "stop_token_ids": [first]}, {**prompt, "stop_token_ids": [second], "min_tokens": 2},
        {**prompt, "stop_token_ids": [third], "ignore_eos": True}, {**prompt, "echo": True},
        {**prompt, "logit_bias": {"65": 100}, "stop": ["A"]}, {**prompt, "logit_bias": {"65": 100}, "stop": ["AA"]},
        {**prompt, "frequency_penalty": 1.5, "presence_penalty": 1, "repetition_penalty": 1.3},
        {**prompt, "prompt": PROMPTS[3:6], "n": 2, "seed": 3, "temperature": 1, "logprobs": 1},
    ]
    chats = [chat, {**chat, "n": 3, "logprobs": True, "top_logprobs": 2}, {**chat, "top_p": 0.5, "top_k": 7}]
    return [("/v1/completions", body) for body in completions] + [("/v1/chat/completions", body) for body in chats]


async def test_relay_and_local_mode_give_the_same_json_HND_05(model_t: Path) -> None:
    async with house(model_t, "prefill", "decode") as relay, house(model_t, "decode") as local:
        assert (await local.greedy(PROMPTS[7], 0))[1].mode == "local"
        for path, body in await bodies(relay):
            assert await relay.reply(path, body) == await local.reply(path, body), (path, body)
        for worker in (*relay.workers, *local.workers):
            assert_worker_is_empty(worker.engine)
