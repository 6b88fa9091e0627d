"""What one step of a worker brings a stream is one write to its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from kvrelay.core.output import GenerateRequest, Output
from kvrelay.router.fakes import FakeFront
from tests.router_http.support import CHAT, COMPLETIONS, join_stream, read_events, strict_json, tokenizer
from tests.router_http.test_http import Connection
from tests.support.virtual_time import run_virtual

TEXT = 'say "hello" \\ \n ☃ again'
STEP = 3


class Stepping(FakeFront):
    """Every third output ends a step."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Output, None]:
        number = 0
        async for output in super().generate(request):
            yield output
            number += 1
            if number % STEP == 0:
                await asyncio.sleep(1.0)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("logprobs", [False, True])
def test_several_tokens_of_a_step_are_one_write(path: str, logprobs: bool) -> None:
    async def story() -> None:
        ids = TEXT.encode()
        door = Stepping(tokenizer(), answer=lambda request, choice: list(ids))
        fields = {"logprobs": True if path == CHAT else 1} if logprobs else {}
        connection = Connection(door, path, {"stream": True, "max_tokens": 100, **fields})
        await connection.run()
        bodies = [message["body"] for message in connection.sent if message["type"] == "http.response.body"]
        steps = [body for body in bodies if b'"finish_reason":null' in body]
        num_outputs = 1 + len(ids) + 3
        assert len(steps) == -(-(1 + len(ids)) // STEP)
        assert len(bodies) <= -(-num_outputs // STEP) + 2, "a write per step, [DONE], the end"
        chunks = [strict_json(event) for event in read_events(b"".join(bodies).decode()) if event != "[DONE]"]
        assert join_stream(chunks)[0]["text"] == TEXT
        assert len({(chunk["id"], chunk["model"], chunk["created"]) for chunk in chunks}) == 1

    run_virtual(story())
