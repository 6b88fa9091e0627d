"""Odd requests against the real cluster, with streams running beside them that must not notice (API-01, 03, 04, 06).

The front door's own tests (tests/router_http) go through every field; here the same kinds of request pass through
the proxy, the router and real workers, and a canary shows that nobody else has paid for them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Cluster

pytestmark = pytest.mark.cluster

CONTEXT = 256
BESIDE = 4
FIELDS = (
    "max_tokens", "temperature", "top_p", "n", "stop", "stream", "seed", "logit_bias", "logprobs", "user",
    "stream_options", "response_format", "tools", "tool_choice",
)  # fmt: skip


class Api:
    """Short words for calls to the cluster's HTTP API."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self.client = client
        self.model = model

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.client.post("/completions", json={"model": self.model, "temperature": 0, **body})

    async def chat(self, **body: Any) -> httpx.Response:
        filled = {"model": self.model, "temperature": 0, "messages": [{"role": "user", "content": "hi"}], **body}
        return await self.client.post("/chat/completions", json=filled)

    async def text(self, prompt: Any, max_tokens: int = 24) -> str:
        reply = await self.complete(prompt=prompt, max_tokens=max_tokens)
        assert reply.status_code == 200, reply.text
        text: str = reply.json()["choices"][0]["text"]
        return text

    async def streamed(self, prompt: str, max_tokens: int) -> str:
        body = {"model": self.model, "temperature": 0, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        pieces = []
        async with self.client.stream("POST", "/completions", json=body) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    pieces += [choice["text"] for choice in event["choices"]]
        return "".join(pieces)


@asynccontextmanager
async def api_with_streams_beside(cluster: Cluster) -> AsyncIterator[Api]:
    """Four long streams run while the body does; each must end with the text it has when nothing else happens."""
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=60) as client:
        api = Api(client, cluster.model)
        prompts = [f"stream number {i} goes on" for i in range(BESIDE)]
        expected = [await api.streamed(prompt, 100) for prompt in prompts]
        beside = [asyncio.create_task(api.streamed(prompt, 100)) for prompt in prompts]
        yield api
        assert await asyncio.gather(*beside) == expected
        assert (await client.get(f"{cluster.state.http}/healthz")).status_code == 200


def assert_refused(reply: httpx.Response, *words: str, param: str | None = None) -> None:
    assert reply.status_code == 400, (reply.status_code, reply.text)
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert all(word in error["message"] for word in words), error
    if param is not None:
        assert error["param"].split("[")[0] == param, error


async def test_API_01_null_is_absent_and_unknown_keys_are_ignored(cluster: Cluster) -> None:
    async with api_with_streams_beside(cluster) as api:
        plain = (await api.chat(max_tokens=8)).json()["choices"][0]["message"]["content"]
        for field in FIELDS:
            body = {"max_tokens": 8, field: None}
            if field == "max_tokens":
                body["max_completion_tokens"] = 8
            reply = await api.chat(**body)
            assert reply.status_code == 200, (field, reply.text)
            if field != "temperature":
                assert reply.json()["choices"][0]["message"]["content"] == plain, field
        extra = {"foo": 1, "store": False, "metadata": {}, "service_tier": None}
        messages = [{"role": "user", "content": "hi", "name": "bob", "id": 7}]
        reply = await api.chat(max_tokens=8, messages=messages, **extra)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"] == plain


async def test_API_03_empty_prompts_cost_nobody_anything(cluster: Cluster) -> None:
    async with api_with_streams_beside(cluster) as api:
        for prompt in ([], [[]], ["a", ""], [""], ""):
            reply = await api.complete(prompt=prompt, max_tokens=4)
            expected = 400 if prompt in ([], [[]]) else 200  # the model has a BOS, so "" is a prompt of one token
            assert reply.status_code == expected, (prompt, reply.text)
            if expected == 400:
                assert_refused(reply, param="prompt")
        assert_refused(await api.chat(messages=[]), param="messages")
        for content in ("", "   "):
            reply = await api.chat(messages=[{"role": "user", "content": content}], max_tokens=4)
            assert reply.status_code == 200, reply.text
        reply = await api.chat(messages=[{"role": "system", "content": "be brief"}], max_tokens=4)
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_output"),
    [(254, None, 2), (254, 1, 1), (254, 2, 2), (255, None, 1), (255, 1, 1), (255, 0, 0), (256, 0, 0)],
)
async def test_API_04_what_fits_the_context_ends_there(
    cluster: Cluster, num_prompt: int, max_tokens: int | None, num_output: int
) -> None:
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=60) as client:
        api = Api(client, cluster.model)
        reply = await api.complete(prompt=[65] * num_prompt, max_tokens=max_tokens, ignore_eos=True)
        assert reply.status_code == 200, reply.text
        usage = reply.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, num_output)
        assert reply.json()["choices"][0]["finish_reason"] == "length"


async def test_API_04_what_does_not_fit_is_refused_with_the_numbers(cluster: Cluster) -> None:
    async with api_with_streams_beside(cluster) as api:
        for num_prompt, max_tokens in ((254, 3), (255, 2), (256, None), (256, 1), (257, None), (200, 57)):
            reply = await api.complete(prompt=[65] * num_prompt, max_tokens=max_tokens)
            assert_refused(reply, str(CONTEXT), str(num_prompt), *([str(max_tokens)] if max_tokens else []))
        for max_tokens in (-1, 2**31, 10**18, 1.5):
            assert_refused(await api.complete(prompt=[65], max_tokens=max_tokens), param="max_tokens")


async def test_API_06_logprobs_are_all_there_or_refused(cluster: Cluster) -> None:
    async with api_with_streams_beside(cluster) as api:
        for top in (None, 0, 1, 20):
            body = {} if top is None else {"top_logprobs": top}
            reply = await api.chat(logprobs=True, max_tokens=5, ignore_eos=True, **body)
            assert reply.status_code == 200, reply.text
            entries = reply.json()["choices"][0]["logprobs"]["content"]
            assert [len(entry["top_logprobs"]) for entry in entries] == [top or 0] * 5
        assert_refused(await api.chat(logprobs=True, top_logprobs=21), param="top_logprobs")
        assert_refused(await api.chat(logprobs=True, top_logprobs=-1), param="top_logprobs")
        assert_refused(await api.chat(top_logprobs=5), param="top_logprobs")
        assert_refused(await api.complete(prompt="a", logprobs=True), param="logprobs")
        for odd in ({"top_p": 0.1}, {"top_k": 1}, {"logit_bias": {"65": -100}}):
            reply = await api.complete(prompt="a", logprobs=5, max_tokens=5, ignore_eos=True, temperature=1, **odd)
            strict = json.loads(reply.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
            assert len(strict["choices"][0]["logprobs"]["tokens"]) == 5
