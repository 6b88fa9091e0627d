"""The SDK's life stories, each told by both clients against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvrelay.client import (
    AsyncClient,
    BadRequest,
    Broken,
    Client,
    DeadlineExceeded,
    Delta,
    Event,
    Finished,
    NoRoom,
    QuotaExceeded,
    RetryPolicy,
    Started,
    Summary,
    TooLarge,
    Unauthorised,
    Unavailable,
)
from tests.client.scripted import WHOLE, Cut, Hang, ScriptedServer, delta, finish, started, summary

Ask = Callable[..., list[Event]]
QUICK = RetryPolicy(first_pause_s=0.001, max_pause_s=0.002)


def ask_sync(
    target: Any, *args: Any, method: str = "generate", client: dict[str, Any] | None = None, **options: Any
) -> Any:
    with Client(target, retry=QUICK, **(client or {})) as opened:
        answer = getattr(opened, method)(*args, **options)
        return list(answer) if method in ("generate", "chat") else answer


def ask_async(
    target: Any, *args: Any, method: str = "generate", client: dict[str, Any] | None = None, **options: Any
) -> Any:
    async def story() -> Any:
        async with AsyncClient(target, retry=QUICK, **(client or {})) as opened:
            answer = getattr(opened, method)(*args, **options)
            return [event async for event in answer] if method in ("generate", "chat") else await answer

    return asyncio.run(story())


@pytest.fixture(params=[ask_sync, ask_async], ids=["sync", "async"])
def ask(request: pytest.FixtureRequest) -> Ask:
    chosen: Ask = request.param
    return chosen


def token_ids(events: list[Event]) -> list[int]:
    return [token.token_id for event in events if isinstance(event, Delta) for token in event.tokens]


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def test_a_request_from_start_to_summary(ask: Ask) -> None:
    with ScriptedServer() as server:
        events = ask(server.target, "hello", temperature=0.0, max_tokens=3, stop="\n", logit_bias={5: 1.0}, n=1)
    assert events[0] == Started("r1", 7, 3, "demo")
    assert token_ids(events) == [10, 11, 12]
    assert text(events) == "<10><11><12>"
    assert events[-2] == Finished("stop", 0, 2)
    assert isinstance(events[-1], Summary)
    assert events[-1].timing.first_token == 12.5
    options = server.requests[0].options
    assert server.requests[0].text == "hello"
    assert options.HasField("temperature")
    assert not options.HasField("seed")
    assert list(options.stop) == ["\n"]
    assert dict(options.logit_bias) == {5: 1.0}


def test_chat_and_token_prompts(ask: Ask) -> None:
    with ScriptedServer() as server:
        ask(server.target, [{"role": "user", "content": "hi"}], method="chat", session_id="s1", model="demo")
        ask(server.target, [1, 2, 3])
        ask(server.target, [])
    chat, ids, empty = server.requests
    assert chat.messages[0].content == "hi"
    assert (chat.session_id, chat.model) == ("s1", "demo")
    assert list(ids.ids.ids) == [1, 2, 3]
    assert empty.WhichOneof("prompt") == "ids"


def test_a_plain_string_is_one_question(ask: Ask) -> None:
    with ScriptedServer() as server:
        ask(server.target, "Name the capital of Japan.", method="chat")
    (message,) = server.requests[0].messages
    assert (message.role, message.content) == ("user", "Name the capital of Japan.")


def test_deadline_key_and_name_travel_as_metadata(ask: Ask) -> None:
    with ScriptedServer() as server:
        ask(server.target, "x", timeout_s=30.0, request_id="mine", client={"api_key": "k"})
    seen = server.metadata[0]
    assert 0 < int(seen["kvrelay-timeout-ms"]) <= 30_000
    assert 0 < server.left_s[0] <= 31
    assert seen["authorization"] == "Bearer k"
    assert seen["x-request-id"] == "mine"


def test_the_small_calls(ask: Ask) -> None:
    with ScriptedServer((Unavailable("starting"),), WHOLE) as server:
        assert ask(server.target, "ab", method="tokenize", add_special_tokens=False) == [97, 98]
        assert len(server.requests) == 2
        assert server.requests[1].no_special_tokens
        assert ask(server.target, [97, 98], method="detokenize") == "ab"
        assert [model.id for model in ask(server.target, method="models")] == ["demo"]


@pytest.mark.parametrize(
    "error",
    [
        BadRequest("too long", param="prompt", code="context_length_exceeded"),
        Unauthorised("no key"),
        TooLarge("big"),
        Broken("bug"),
        DeadlineExceeded("late"),
    ],
)
def test_errors_keep_their_kind_and_are_not_retried(ask: Ask, error: Any) -> None:
    with ScriptedServer((error,)) as server:
        with pytest.raises(type(error)) as raised:
            ask(server.target, "x")
        assert len(server.requests) == 1
    assert type(raised.value) is type(error)
    assert (raised.value.message, raised.value.code, raised.value.param) == (error.message, error.code, error.param)


def test_retried_before_the_first_token(ask: Ask) -> None:
    scripts = [
        (Unavailable("gone", retry_after_s=0.0),), (NoRoom("full", retry_after_s=0.01),), (started(5), Cut()), WHOLE,
    ]
    with ScriptedServer(*scripts) as server:
        events = ask(server.target, "x")
        assert len(server.requests) == 4
    assert [type(event) for event in events].count(Started) == 1
    assert isinstance(events[0], Started)
    assert events[0].seed == 5
    assert server.requests[3].options.seed == 5, "the seed that the caller was told"
    assert token_ids(events) == [10, 11, 12]
    assert events[-1].num_resumes == 0  # type: ignore[union-attr]


def test_a_nonsense_target_is_unavailable_after_all_attempts(ask: Ask) -> None:
    with ScriptedServer() as server:
        port = server.port
    with pytest.raises(Unavailable):
        ask(f"127.0.0.1:{port}", "x", timeout_s=20.0)


def test_attempts_and_patience_are_bounded(ask: Ask) -> None:
    with ScriptedServer((Unavailable("gone"),)) as server:
        with pytest.raises(Unavailable, match="gone"):
            ask(server.target, "x")
        assert len(server.requests) == QUICK.max_attempts
    with ScriptedServer((QuotaExceeded("wait", retry_after_s=3_600.0),)) as server:
        with pytest.raises(QuotaExceeded) as raised:
            ask(server.target, "x")
        assert len(server.requests) == 1, "longer than the deadline: not worth waiting"
    assert raised.value.retry_after_s == 3_600.0


@pytest.mark.parametrize("ending", [Unavailable("router died"), Cut()], ids=["error", "cut"])
def test_a_broken_stream_goes_on_where_it_was(ask: Ask, ending: Any) -> None:
    scripts = [
        (started(9), delta(0, 10), delta(1, 11), ending),
        (NoRoom("full", retry_after_s=0.0),),
        (started(9), delta(2, 12), finish(), summary()),
    ]
    with ScriptedServer(*scripts) as server:
        events = ask(server.target, "hello", max_tokens=8)
    assert token_ids(events) == [10, 11, 12]
    assert [type(event) for event in events] == [Started, Delta, Delta, Delta, Finished, Summary]
    again = server.requests[2]
    assert (again.text, list(again.resume), again.options.seed, again.options.max_tokens) == ("hello", [10, 11], 9, 8)
    assert again.resume_chars == len("".join(event.text for event in events[1:3]))  # type: ignore[union-attr]
    assert list(server.requests[0].resume) == []
    assert not server.requests[0].HasField("resume_chars")
    assert events[-1].num_resumes == 2  # type: ignore[union-attr]


def test_several_choices_are_not_resumed(ask: Ask) -> None:
    script = (started(), delta(0, 10, choice=0), delta(0, 20, choice=1), Unavailable("died"))
    with ScriptedServer(script) as server:
        with pytest.raises(Unavailable, match="died"):
            ask(server.target, "x", n=2)
        assert len(server.requests) == 1


def test_a_lost_summary_is_made_up(ask: Ask) -> None:
    with ScriptedServer((started(), delta(0, 10, 11), finish(), Unavailable("died"))) as server:
        events = ask(server.target, "x")
        assert len(server.requests) == 1
    assert events[-1] == Summary(3, 2)


def test_a_gap_is_our_bug(ask: Ask) -> None:
    script = (started(), delta(0, 10), delta(2, 12))
    with ScriptedServer(script) as server, pytest.raises(Broken, match="2 came where 1"):
        ask(server.target, "x")


def test_the_deadline_ends_a_silent_stream(ask: Ask) -> None:
    with ScriptedServer((started(), Hang())) as server:
        with pytest.raises(DeadlineExceeded):
            ask(server.target, "x", timeout_s=0.2)
        assert len(server.requests) == 1
        assert server.cancelled.acquire(timeout=20)


@pytest.mark.parametrize(
    ("method", "args", "options", "param"),
    [
        ("generate", ("\ud83d",), {}, "prompt"),
        ("generate", ([-1],), {}, "prompt"),
        ("generate", ("x",), {"seed": 2**63}, "seed"),
        ("generate", ("x",), {"max_tokens": -1}, "max_tokens"),
        ("generate", ("x",), {"stop": ["\ude00x"]}, "stop"),
        ("generate", ("x",), {"session_id": "\ud83d"}, "session_id"),
        ("generate", ("x",), {"maxtokens": 3}, "maxtokens"),
        ("generate", ("x",), {"request_id": "a\nb"}, "x-request-id"),
        ("chat", ([{"role": "user", "content": "\ud83d"}],), {}, "messages[0]"),
        ("chat", ([{"role": "user"}, {"rôle": "user"}],), {}, "messages[1]"),
        ("chat", (["hello"],), {}, "messages[0]"),
    ],
)
def test_what_cannot_be_sent_names_its_field(ask: Ask, method: str, args: Any, options: Any, param: str) -> None:
    """TOK-03 for the SDK."""
    with ScriptedServer() as server:
        with pytest.raises(BadRequest) as raised:
            ask(server.target, *args, method=method, **options)
        assert raised.value.param == param
        assert server.requests == []


def test_a_long_prompt_fits_and_a_huge_one_is_refused(ask: Ask) -> None:
    """GRP-01."""
    with ScriptedServer() as server:
        assert token_ids(ask(server.target, "x" * 5_000_000)) == [10, 11, 12]
        with pytest.raises(TooLarge, match="larger than max"):
            ask(server.target, "x" * 9_000_000)


def test_the_next_target_takes_over(ask: Ask) -> None:
    with (
        ScriptedServer((started(), delta(0, 10), Unavailable("dying"))) as first,
        ScriptedServer((started(), delta(1, 11), finish(), summary())) as second,
    ):
        events = ask([first.target, second.target], "x")
        assert token_ids(events) == [10, 11]
        assert list(second.requests[0].resume) == [10]


async def test_leaving_the_iterator_cancels_the_call() -> None:
    with ScriptedServer((started(), delta(0, 10), Hang())) as server:
        async with AsyncClient(server.target) as client:
            async for event in client.generate("x"):
                if isinstance(event, Delta):
                    break
            assert await asyncio.to_thread(server.cancelled.acquire, timeout=20)
            async with client.generate("x") as stream:
                assert isinstance(await anext(stream), Started)
            assert await asyncio.to_thread(server.cancelled.acquire, timeout=20)
            stream = client.generate("x")
            await anext(stream)
            task = asyncio.ensure_future(stream.text())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(server.cancelled.acquire, timeout=20)


def test_leaving_the_sync_iterator_cancels_the_call() -> None:
    with ScriptedServer((started(), delta(0, 10), Hang())) as server, Client(server.target) as client:
        for event in client.generate("x"):
            if isinstance(event, Delta):
                break
        assert server.cancelled.acquire(timeout=20)
        with client.generate("x") as stream:
            assert isinstance(next(stream), Started)
        assert server.cancelled.acquire(timeout=20)


async def test_closing_the_client_ends_its_streams() -> None:
    with ScriptedServer((started(), Hang())) as server:
        client = AsyncClient(server.target)
        stream = client.generate("x")
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(RuntimeError, match="closed"):
            await waiting
        with pytest.raises(RuntimeError, match="closed"):
            await client.models()


async def test_three_hundred_streams_and_a_call_beside_them() -> None:
    """GRP-05: no stream waits unseen behind a full connection."""
    with ScriptedServer((started(), Hang())) as server:
        async with AsyncClient(server.target) as client:
            streams = [client.generate("x") for _ in range(300)]
            await asyncio.gather(*(anext(stream) for stream in streams))
            assert server.num_open == 300
            assert len(server.peers) >= 4
            assert await client.models()
            await asyncio.gather(*(stream.aclose() for stream in streams))
            for _ in range(300):
                assert await asyncio.to_thread(server.cancelled.acquire, timeout=20)


def test_one_sync_client_in_many_threads() -> None:
    with ScriptedServer() as server, Client(server.target) as client, ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda _: client.generate("x").text(), range(40)))
    assert texts == ["<10><11><12>"] * 40
