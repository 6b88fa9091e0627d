"""The `openai` package and a real server on a socket: what a user's program sees."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
import uvicorn

from kvrelay.core.errors import NoRoom, Unavailable
from kvrelay.router.fakes import FakeFront, Fault
from kvrelay.router.http import build_app
from tests.router_http.support import HELLO, answering, front


@asynccontextmanager
async def serving(door: FakeFront) -> AsyncIterator[openai.AsyncOpenAI]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build_app(door), log_level="critical", lifespan="off"))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    try:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=20.0) as client:
            yield client
    finally:
        server.should_exit = True
        await running
        listener.close()


async def test_whole_and_streamed_answers() -> None:
    async with serving(answering("Tokyo 🗼")) as client:
        reply = await client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True)
        assert reply.choices[0].message.content == "Tokyo 🗼"
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage is not None
        assert reply.usage.completion_tokens == len("Tokyo 🗼".encode())
        assert reply.choices[0].logprobs is not None
        assert len(reply.choices[0].logprobs.content or ()) == reply.usage.completion_tokens
        stream = await client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Tokyo 🗼"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == reply.usage.completion_tokens
        assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_errors_have_their_types() -> None:
    async with serving(front()) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="tiny", prompt="a", temperature=7.0)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="a")
    async with serving(front(fault=Fault(0, NoRoom("full", retry_after_s=1.0)))) as client:
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="tiny", prompt="a")


async def test_STR_04_an_error_in_the_stream_is_raised() -> None:
    async with serving(answering("abcdef", fault=Fault(3, Unavailable("worker lost")))) as client:
        stream = await client.completions.create(model="tiny", prompt="a", stream=True)
        assert [(await anext(stream)).choices[0].text for _ in "ab"] == ["a", "b"]
        with pytest.raises(openai.APIError, match="worker lost"):
            await anext(stream)


async def test_CAN_01_closing_the_connection_cancels() -> None:
    door = answering("abcdef", hold_at=3)
    async with serving(door) as client:
        stream = await client.completions.create(model="tiny", prompt="a", stream=True)
        await door.holding.wait()
        await stream.close()
        await door.idle.wait()
        door.holding.clear()
        whole = asyncio.create_task(client.completions.create(model="tiny", prompt="b"))
        await door.holding.wait()
        whole.cancel()
        await asyncio.gather(whole, return_exceptions=True)
        await door.idle.wait()
        assert door.num_cancelled == 2
