"""The STR and TOK rows over HTTP: what is streamed is the whole, cut; errors are told; nobody waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.core.errors import Unavailable
from kvrelay.router.fakes import Fault
from tests.router_http.support import (
    CHAT,
    COMPLETIONS,
    answer,
    answering,
    ask,
    events,
    front,
    join_stream,
    read_events,
    refusal,
    strict_json,
    whole,
)
from tests.support.virtual_time import run_virtual

BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


@BOTH
async def test_STR_01_usage_only_when_asked(path: str) -> None:
    for options in (None, {}, {"include_usage": None}, {"include_usage": False}):
        chunks = await events(front(), path, n=2, stream_options=options)
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
    chunks = await events(front(), path, n=2, stream_options={"include_usage": True})
    assert [chunk for chunk in chunks if "usage" in chunk] == [chunks[-1]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == (await answer(front(), path, n=2))["usage"]
    for options in ({}, {"include_usage": True}):
        assert await refusal(front(), path, stream_options=options) == (400, "stream_options")


async def test_STR_01_the_first_chunk_of_each_choice_carries_the_role() -> None:
    chunks = await events(front(chunk_tokens=3), CHAT, n=2)
    for index in (0, 1):
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"][0]["index"] == index]
        assert deltas[0]["role"] == "assistant"
        assert all("role" not in delta for delta in deltas[1:])
        assert deltas[-1] == {}, "the finish chunk"
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_STR_01_a_choice_without_output_has_a_role_and_an_end() -> None:
    chunks = await events(front(), CHAT, max_tokens=0)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}]


@BOTH
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["cd"], "ab"), (["cdX", "de"], "abc"), (["h"], "abcdefg"), (["abcdefgh"], ""), ("ef", "abcd"),
        (["ab", "abc", "bc", "cdX"], ""), (None, "abcdefgh"), ([], "abcdefgh"), (["xyz"], "abcdefgh"),
    ],
)  # fmt: skip
async def test_STR_02_stop_strings(path: str, stop: Any, text: str) -> None:
    for logprobs in ({"logprobs": None}, {"logprobs": True} if path == CHAT else {"logprobs": 1}):
        for chunk_tokens in (1, 3, 8):
            door = answering("abcdefgh", chunk_tokens=chunk_tokens)
            streamed = join_stream(await events(door, path, stop=stop, **logprobs))
            reply = whole(await answer(door, path, stop=stop, **logprobs))
            assert reply[0]["text"] == text
            assert reply[0]["finish_reason"] == ("length" if text == "abcdefgh" else "stop")
            assert num_logprobs(reply[0]["logprobs"]) in (None, len(text))
            assert streamed[0]["text"] == text
            assert streamed[0]["finish_reason"] == reply[0]["finish_reason"]
            if text:
                assert streamed == reply


def num_logprobs(logprobs: dict[str, Any] | None) -> int | None:
    return None if logprobs is None else len(logprobs["content"] if "content" in logprobs else logprobs["tokens"])


@BOTH
async def test_STR_02_stops_that_are_refused(path: str) -> None:
    for stop in ("", [""], ["a"] * 5, ["a", 1], [None], 5, {}):
        status, param = await refusal(front(), path, stop=stop)
        assert (status, (param or "").split("[")[0]) == (400, "stop")


@BOTH
async def test_STR_04_an_error_after_bytes_is_one_event_and_the_end(path: str) -> None:
    for error, code in ((Unavailable("worker lost"), "unavailable"), (RuntimeError("secret"), "internal_error")):
        response = await ask(answering("abcdef", fault=Fault(3, error)), path, stream=True)
        assert response.status_code == 200
        data = [strict_json(event) for event in read_events(response.text)]
        assert data[-1]["error"]["code"] == code
        assert [chunk["choices"][0]["finish_reason"] for chunk in data[:-1]] == [None, None]
        assert "secret" not in response.text
        assert "[DONE]" not in response.text


async def test_STR_04_a_bad_request_is_json_and_no_stream() -> None:
    assert await refusal(front(), CHAT, stream=True, n=0) == (400, "n")


def test_STR_06_a_comment_every_15_s_before_the_first_token() -> None:
    async def story() -> None:
        response = await ask(answering("hi", first_token_delay_s=70.0), CHAT, stream=True)
        assert response.text.count(": still working\n\n") == 4
        assert response.text.startswith(":")
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["content-type"].startswith("text/event-stream")
        assert read_events(response.text)[-1] == "[DONE]"

    run_virtual(story())


def test_STR_06_an_error_after_the_first_comment_is_an_event() -> None:
    async def story() -> None:
        door = front(first_token_delay_s=70.0, hold_at=None, fault=Fault(2, Unavailable("lost")))
        response = await ask(door, CHAT, stream=True)
        assert response.status_code == 200
        assert strict_json(read_events(response.text)[-1])["error"]["code"] == "unavailable"

    run_virtual(story())


@BOTH
@pytest.mark.parametrize("text", ["é", "語", "🌶", "👩‍👩‍👧", "e\u0301"])
async def test_TOK_01_characters_arrive_whole(path: str, text: str) -> None:
    door = answering(text)
    chunks = await events(door, path, **({"logprobs": True} if path == CHAT else {"logprobs": 0}))
    assert "\ufffd" not in "".join(c["choices"][0].get("text", "") for c in chunks)
    joined = join_stream(chunks)[0]
    assert joined["text"] == text
    if path == CHAT:
        assert [entry["bytes"] for entry in joined["logprobs"]["content"]] == [[byte] for byte in text.encode()]


@BOTH
async def test_TOK_01_a_cut_character_is_the_same_in_both_modes(path: str) -> None:
    door = answering("a🌶")
    assert whole(await answer(door, path, max_tokens=3)) == join_stream(await events(door, path, max_tokens=3))
    assert whole(await answer(door, path, max_tokens=3))[0]["text"] == "a\ufffd"


TEXT = st.one_of(st.binary(min_size=1, max_size=24), st.text("ab🌶", min_size=1, max_size=10).map(str.encode))


@given(
    data=TEXT,
    stop=st.lists(st.text("ab🌶", min_size=1, max_size=3), max_size=3),
    chunk_tokens=st.integers(1, 7),
    logprobs=st.booleans(),
    n=st.integers(1, 2),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_streamed_and_whole_replies_say_the_same(
    data: bytes, stop: list[str], chunk_tokens: int, logprobs: bool, n: int
) -> None:
    async def story() -> None:
        door = answering(data, chunk_tokens=chunk_tokens)
        for path in (CHAT, COMPLETIONS):
            fields: dict[str, Any] = {"stop": stop, "n": n}
            if logprobs:
                fields |= {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
            reply = whole(await answer(door, path, **fields))
            streamed = join_stream(await events(door, path, **fields))
            for index, choice in reply.items():
                if choice["logprobs"] and not num_logprobs(choice["logprobs"]):
                    choice["logprobs"] = None  # nothing was visible: the stream had no place to say so
                assert streamed[index] == choice

    run_virtual(story())
