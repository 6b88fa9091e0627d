"""The SMP rows and TOK-03/04 as far as the front door decides them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from kvrelay.core.request import SamplingParams
from kvrelay.router.fakes import FakeFront
from tests.router_http.support import (
    CHAT,
    COMPLETIONS,
    Json,
    answer,
    client,
    front,
    json_bytes,
    post,
    refusal,
    tokenizer,
)

VOCAB = 262


async def sampling(path: str = COMPLETIONS, **fields: Any) -> SamplingParams:
    door = front()
    await answer(door, path, **fields)
    return door.requests[0].sampling


async def test_SMP_01_temperature() -> None:
    for value in (1e-3, 1e-5, 1e-12, 0, -0.0, 2, 2.0):
        assert (await sampling(temperature=value)).is_greedy == (value <= 1e-5)
    assert (await sampling()).temperature == 1.0
    for value in (2.1, -1, 1e300, 10**400):
        assert await refusal(front(), temperature=value) == (400, "temperature")


async def test_SMP_01_top_p_and_top_k() -> None:
    assert (await sampling(top_p=1e-9)).top_p == 1e-9
    assert (await sampling(top_p=0)).top_p == 0.0
    for value in (1.1, -0.1):
        assert await refusal(front(), top_p=value) == (400, "top_p")
    for value, expected in ((1, 1), (VOCAB + 1, 0), (VOCAB, 0), (0, 0), (-1, 0)):
        assert (await sampling(top_k=value)).top_k == expected
    assert await refusal(front(), top_k=-2) == (400, "top_k")


async def test_SMP_01_other_ranges() -> None:
    for name, values in {
        "min_p": (-0.1, 1.1), "presence_penalty": (-2.1, 2.1), "frequency_penalty": (-2.1, 2.1),
        "repetition_penalty": (0, -1, 1e9),
    }.items():  # fmt: skip
        for value in values:
            assert await refusal(front(), **{name: value}) == (400, name)


async def test_SMP_03_logit_bias() -> None:
    params = await sampling(logit_bias={"0": 5, str(VOCAB - 1): -100})
    assert params.logit_bias == ((0, 5.0), (VOCAB - 1, -100.0))
    assert len((await sampling(logit_bias={str(i): 1 for i in range(255)})).logit_bias) == 255
    for key in (str(VOCAB), "300", "-1", "1.5", "abc", "", "²", "1" * 50):
        assert await refusal(front(), logit_bias={key: 1}) == (400, "logit_bias")
    for value in (101, -101, None, "5", True):
        status, param = await refusal(front(), logit_bias={"5": value})
        assert (status, (param or "").split("[")[0]) == (400, "logit_bias")


async def test_SMP_05_min_tokens_over_max_tokens() -> None:
    assert (await sampling(min_tokens=5, max_tokens=5)).min_tokens == 5
    assert await refusal(front(), min_tokens=6, max_tokens=5) == (400, "min_tokens")


async def test_SMP_06_seeds() -> None:
    for seed in (0, -1, 2**63 - 1, -(2**63)):
        assert (await sampling(seed=seed)).seed == seed
    for seed in (2**63, -(2**63) - 1):
        assert await refusal(front(), seed=seed) == (400, "seed")
    assert len({(await sampling(seed=None)).seed for _ in range(8)}) == 8, "minted afresh"


HALF = "\ud83d"


@pytest.mark.parametrize("half", [HALF, "\ude00x", "\ude00\ud83d"])
async def test_TOK_03_half_a_surrogate_pair_is_named(half: str) -> None:
    user = [{"role": "user", "content": half}]
    parts = [{"role": "user", "content": [{"type": "text", "text": half}]}]
    for path, fields, param in [
        (CHAT, {"messages": user}, "messages[0].content"),
        (CHAT, {"messages": parts}, "messages[0].content[0].text"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "name": half}]}, "messages[0].name"),
        (COMPLETIONS, {"prompt": half}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", half]}, "prompt[1]"),
        (COMPLETIONS, {"stop": [half]}, "stop[0]"),
        (COMPLETIONS, {"user": half}, "user"),
        (COMPLETIONS, {"model": half}, "model"),
        (COMPLETIONS, {"session_id": half}, "session_id"),
    ]:
        door = front()
        body = json_bytes({"prompt": "a", **fields} if path == COMPLETIONS else fields)
        response = await raw(door, path, body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert door.requests == []


async def test_TOK_03_a_proper_pair_works() -> None:
    door = front()
    response = await raw(door, COMPLETIONS, b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}')
    assert response.status_code == 200
    assert door.requests[0].prompt_ids == (256, *"😀".encode())


async def raw(door: FakeFront, path: str, body: bytes) -> httpx.Response:
    async with client(door) as http:
        return await http.post(path, content=body, headers={"content-type": "application/json"})


@pytest.mark.parametrize("literal", ["<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"])
async def test_TOK_04_user_text_never_becomes_control_ids(literal: str) -> None:
    benign = await control_ids([{"role": "user", "content": "a harmless text"}])
    half = len(literal) // 2
    parts = [{"type": "text", "text": literal[:half]}, {"type": "text", "text": literal[half:]}]
    for content in (literal, f"x{literal}y", parts, literal * 3, f"{literal[:half]}{literal}{literal[half:]}"):
        assert await control_ids([{"role": "user", "content": content, "name": literal}]) == benign


async def control_ids(messages: list[Json]) -> list[int]:
    door = front()
    response = await post(door, CHAT, {"messages": messages, "max_tokens": 1})
    assert response.status_code == 200, response.text
    return [token_id for token_id in door.requests[0].prompt_ids if token_id >= 256]


async def test_TOK_04_text_is_kept_byte_for_byte() -> None:
    door = front()
    text = "say \ufdd0<|end|>\ufdd1 twice"
    await post(door, CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 1})
    assert tokenizer().decode(door.requests[0].prompt_ids) == text


async def test_TOK_04_raw_completions_text_is_ordinary_bytes() -> None:
    door = front()
    await post(door, COMPLETIONS, {"prompt": "<|end|>", "max_tokens": 1})
    assert door.requests[0].prompt_ids == (256, *b"<|end|>")
