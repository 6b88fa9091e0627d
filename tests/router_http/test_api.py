"""The API rows: what is accepted, what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.core.errors import DeadlineExceeded, NoRoom, QuotaExceeded, Unavailable
from kvrelay.router.fakes import FakeFront, Fault
from kvrelay.router.front import ModelCard
from tests.router_http.support import (
    CHAT,
    COMPLETIONS,
    HELLO,
    answer,
    answering,
    ask,
    front,
    post,
    refusal,
    tokenizer_without_bos,
    whole,
)

OPTIONAL = (
    "max_tokens", "temperature", "top_p", "n", "stop", "stream", "seed", "logit_bias", "logprobs", "user",
    "stream_options", "response_format", "tools", "tool_choice", "top_logprobs", "max_completion_tokens", "top_k",
    "min_p", "min_tokens", "ignore_eos", "stop_token_ids", "session_id", "priority", "echo", "best_of", "suffix",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "service_tier", "model",
)  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_API_01_null_means_absent_for_every_optional_field(path: str) -> None:
    expected = whole(await answer(front(), path))
    for name in OPTIONAL:
        assert whole(await answer(front(), path, **{name: None})) == expected, name


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_API_01_unknown_keys_are_ignored(path: str) -> None:
    expected = whole(await answer(front(), path))
    extra = {"foo": 1, "store": False, "metadata": {}, "service_tier": None}
    assert whole(await answer(front(), path, **extra)) == expected


async def test_API_01_names_and_unknown_keys_in_messages() -> None:
    expected = whole(await answer(front(), CHAT))
    messages = [{**HELLO[0], "name": "bob", "id": 7}]
    assert whole(await answer(front(), CHAT, messages=messages)) == expected


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_API_01_types_are_strict(path: str) -> None:
    wrong = {
        "n": [True, 1.0, "1", 0, -1, 10**6], "temperature": [True, "1", [1]], "stream": [1, "true"], "seed": [1.0],
        "top_k": [1.5], "ignore_eos": [1], "stop_token_ids": [5, ["a"], [300]], "priority": [True], "user": [7],
        "logit_bias": [[1]], "min_tokens": [-1, "2"],
    }  # fmt: skip
    for name, values in wrong.items():
        for value in values:
            status, param = await refusal(front(), path, **{name: value})
            assert (status, (param or "").split("[")[0]) == (400, name), value


def ids(num: int) -> list[int]:
    return [97] * num


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_output"),
    [(254, None, 2), (255, None, 1), (254, 1, 1), (254, 2, 2), (255, 1, 1), (256, 0, 0), (255, 0, 0), (200, 56, 56)],
)
async def test_API_04_what_fits_the_context(num_prompt: int, max_tokens: int | None, num_output: int) -> None:
    reply = await answer(front(), prompt=ids(num_prompt), max_tokens=max_tokens)
    assert reply["choices"][0]["finish_reason"] == "length"
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, num_output)
    assert usage["total_tokens"] == num_prompt + num_output <= 256


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens"),
    [(256, None), (257, None), (257, 0), (256, 1), (255, 2), (200, 57), (1, 2**31), (1, 10**18)],
)
async def test_API_04_what_does_not_fit_is_told_with_all_numbers(num_prompt: int, max_tokens: int | None) -> None:
    response = await ask(front(), prompt=ids(num_prompt), max_tokens=max_tokens)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    for number in (256, num_prompt, max_tokens):
        assert number is None or str(number) in error["message"]


@pytest.mark.parametrize("max_tokens", [-1, 1.5, True, "5"])
async def test_API_04_max_tokens_that_is_no_count(max_tokens: Any) -> None:
    assert await refusal(front(), max_tokens=max_tokens) == (400, "max_tokens")
    assert await refusal(front(), CHAT, max_completion_tokens=max_tokens) == (400, "max_completion_tokens")


async def test_API_04_a_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    assert await refusal(front(), prompt="a" * 100_000) == (400, "prompt")
    assert await refusal(front(), CHAT, messages=[{"role": "user", "content": "a" * 100_000}]) == (400, "messages")


async def test_max_tokens_0_asks_no_worker() -> None:
    door = front()
    reply = await answer(door, CHAT, max_tokens=0, n=2)
    assert [choice["message"]["content"] for choice in reply["choices"]] == ["", ""]
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"length"}
    assert door.requests == []


@pytest.mark.parametrize("prompt", [[], [[]], ["a", 1], [1, "a"], [[1], "a"], [[1], []], 5, None, [True], {}, [-1]])
async def test_API_03_prompts_that_are_none(prompt: Any) -> None:
    status, param = await refusal(front(), prompt=prompt)
    assert status == 400
    assert param is not None
    assert param.startswith("prompt")


async def test_API_03_an_empty_text_is_bos_alone() -> None:
    for prompt in ("", [""]):
        door = front()
        await answer(door, prompt=prompt, max_tokens=1)
        assert [request.prompt_ids for request in door.requests] == [(256,)]
    assert await refusal(FakeFront(tokenizer_without_bos()), prompt="") == (400, "prompt")


async def test_API_03_one_bad_prompt_refuses_the_whole_call() -> None:
    assert await refusal(front(), prompt=["a", "b" * 300]) == (400, None)
    assert await refusal(front(), prompt=[[1], [1, 300]]) == (400, "prompt[1]")


@pytest.mark.parametrize("messages", [[], None, "hi", [5], [{"role": "user"}], [{"role": "user", "content": 5}],
                                      [{"role": "root", "content": "a"}], [{"content": "a"}],
                                      [{"role": "<|system|>", "content": "a"}],
                                      [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
                                      [{"role": "user", "content": [{"type": "text"}]}]])  # fmt: skip
async def test_API_03_messages_that_are_none(messages: Any) -> None:
    status, param = await refusal(front(), CHAT, messages=messages)
    assert status == 400
    assert param is not None
    assert param.startswith("messages")


@pytest.mark.parametrize("content", ["", "   ", [{"type": "text", "text": ""}]])
async def test_API_03_empty_content_is_fine(content: Any) -> None:
    await answer(front(), CHAT, messages=[{"role": "user", "content": content}], max_tokens=2)


async def test_API_03_a_system_message_alone_is_fine() -> None:
    await answer(front(), CHAT, messages=[{"role": "system", "content": "be kind"}], max_tokens=2)


async def test_API_06_chat_logprobs() -> None:
    for top in (None, 0):
        reply = await answer(answering("abc"), CHAT, logprobs=True, top_logprobs=top)
        content = reply["choices"][0]["logprobs"]["content"]
        assert [(entry["token"], entry["bytes"], entry["top_logprobs"]) for entry in content] == [
            ("a", [97], []), ("b", [98], []), ("c", [99], []),
        ]  # fmt: skip
    for top in (1, 20):
        reply = await answer(answering("abc"), CHAT, logprobs=True, top_logprobs=top)
        assert all(len(entry["top_logprobs"]) == top for entry in reply["choices"][0]["logprobs"]["content"])
    for top in (21, -1, True):
        assert await refusal(front(), CHAT, logprobs=True, top_logprobs=top) == (400, "top_logprobs")
    assert await refusal(front(), CHAT, top_logprobs=5) == (400, "top_logprobs")
    assert await refusal(front(), CHAT, logprobs=1) == (400, "logprobs")


async def test_API_06_an_impossible_token_is_minus_9999() -> None:
    reply = await answer(answering("a"), CHAT, logprobs=True, top_logprobs=2)
    assert reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"][1]["logprob"] == -9999.0
    reply = await answer(answering("a"), logprobs=2)
    assert reply["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5, "b": -9999.0}]


async def test_API_06_completions_logprobs() -> None:
    reply = await answer(answering("aé"), logprobs=0)
    assert reply["choices"][0]["logprobs"] == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9"], "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{}, {}, {}], "text_offset": [0, 1, 1],
    }  # fmt: skip
    for top in (5, 6, 20):
        await answer(answering("ab"), logprobs=top)
    for top in (True, 21, -1, 10**6):
        assert await refusal(front(), logprobs=top) == (400, "logprobs")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_API_08_what_is_not_supported_is_refused_by_name(path: str) -> None:
    for value in ({"type": "json_object"}, {"type": "json_schema"}, {"type": "nonsense"}, {}, "json", {"schema": {}}):
        assert await refusal(front(), path, response_format=value) == (400, "response_format")
    assert await refusal(front(), path, tools=[{"type": "function"}]) == (400, "tools")
    assert await refusal(front(), path, tool_choice={"type": "function"}) == (400, "tool_choice")
    for name in ("suffix", "guided_regex", "prompt_logprobs"):
        assert await refusal(front(), path, **{name: "("}) == (400, name)
    await answer(front(), path, response_format={"type": "text"}, tools=[], tool_choice="none")


async def test_choices_of_several_prompts_are_numbered_through() -> None:
    door = front(chunk_tokens=2)
    reply = await answer(door, prompt=["ab", "cd"], n=2, max_tokens=3, best_of=2)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in reply["choices"]] == ["ab", "ab", "cd", "cd"]
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 12), "each prompt counts once"
    assert len({request.request_id for request in door.requests}) == 2


async def test_best_of_other_than_n_is_refused() -> None:
    assert await refusal(front(), best_of=3) == (400, "best_of")


async def test_echo_puts_the_prompt_before_every_choice() -> None:
    reply = await answer(answering("!"), prompt=["ab", "cd"], echo=True, n=2)
    assert [choice["text"] for choice in reply["choices"]] == ["ab!", "ab!", "cd!", "cd!"]
    assert (await answer(answering("!"), prompt=[97, 98], echo=True))["choices"][0]["text"] == "ab!"
    assert (await answer(front(), prompt="ab", echo=True, max_tokens=0))["choices"][0]["text"] == "ab"
    assert await refusal(front(), echo=True, logprobs=1) == (400, "echo")


async def test_the_session_is_header_then_field_then_user() -> None:
    for body, headers, session in [
        ({"user": "u", "session_id": "s"}, {"x-session-id": "h"}, "h"),
        ({"user": "u", "session_id": "s"}, {}, "s"),
        ({"user": "u"}, {}, "u"),
        ({}, {}, None),
    ]:
        door = front()
        await post(door, COMPLETIONS, {"prompt": "a", "max_tokens": 1, **body}, **headers)
        assert door.requests[0].session == session


async def test_an_unknown_model_is_404() -> None:
    assert await refusal(front(), model="gpt-17") == (404, "model")
    assert await refusal(front(), model=5) == (400, "model")


async def test_usage_has_the_extensions() -> None:
    usage = (await answer(front(), CHAT))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert set(usage["timing_ms"]) == {
        "queue", "reserve", "prefill", "first_token", "transfer_hidden", "transfer_unhidden",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (NoRoom("full", retry_after_s=2.5), 429, "3"),
        (QuotaExceeded("used up", retry_after_s=0.1), 429, "1"),
        (Unavailable("gone", retry_after_s=4.0), 503, "4"),
        (DeadlineExceeded("late"), 504, None),
        (RuntimeError("secret"), 500, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_byte_have_their_status(
    error: Exception, status: int, retry_after: str | None, stream: bool
) -> None:
    for at in (0, 1):
        response = await ask(front(fault=Fault(at, error)), CHAT, stream=stream)
        assert (response.status_code, response.headers.get("retry-after")) == (status, retry_after)
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert "secret" not in response.text
        assert response.headers["x-request-id"]


async def test_no_worker_is_503() -> None:
    response = await ask(front(card=ModelCard("tiny", 0, 0)), CHAT)
    assert response.status_code == 503
    assert "retry-after" in response.headers


async def test_limits_on_prompts_and_stops() -> None:
    assert await refusal(front(), prompt=["a"] * 1000) == (400, "prompt")
    assert await refusal(front(), stop=["a" * 100_000]) == (400, "stop")
    assert await refusal(front(), stop=["a"] * 10_000) == (400, "stop")
    assert await refusal(front(), n=10**6) == (400, "n")
