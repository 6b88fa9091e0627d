"""A front door over the tiny tokenizer, and a client that talks to it without a socket."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from kvrelay.router.fakes import FakeFront
from kvrelay.router.http import build_app
from kvrelay.text.tokenizer import Tokenizer
from tests.support.tiny import write_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
Json = dict[str, Any]


@cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        return Tokenizer.from_directory(write_tokenizer(Path(directory)))


@cache
def tokenizer_without_bos() -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        return Tokenizer.from_directory(write_tokenizer(Path(directory), bos=False))


def front(**fields: Any) -> FakeFront:
    return FakeFront(tokenizer(), **fields)


def answering(text: str | bytes, **fields: Any) -> FakeFront:
    """A front door whose every choice says this, one byte per token."""
    data = text.encode() if isinstance(text, str) else text
    return front(answer=lambda request, choice: list(data), **fields)


def client(door: FakeFront) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(door, unix_time=lambda: 1_700_000_001.0), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://kvrelay")


async def post(door: FakeFront, path: str, body: Any, **headers: str) -> httpx.Response:
    async with client(door) as http:
        return await http.post(path, json=body, headers=headers)


async def ask(door: FakeFront, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
    """One call with a harmless prompt, unless `fields` say otherwise."""
    given: Json = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    return await post(door, path, {"model": "tiny", **given, **fields})


async def answer(door: FakeFront, path: str = COMPLETIONS, **fields: Any) -> Json:
    response = await ask(door, path, **fields)
    assert response.status_code == 200, response.text
    return strict_json(response.text)


def strict_json(text: str) -> Json:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    value = json.loads(text, parse_constant=refuse)
    assert isinstance(value, dict)
    return value


async def refusal(door: FakeFront, path: str = COMPLETIONS, **fields: Any) -> tuple[int, str | None]:
    """Status and param of a call that must be refused, in the error form, without anything having started."""
    response = await ask(door, path, **fields)
    body = strict_json(response.text)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    assert door.requests == []
    return response.status_code, body["error"]["param"]


async def events(door: FakeFront, path: str = COMPLETIONS, **fields: Any) -> list[Json]:
    """The chunks of a streamed call; the stream must end as it should."""
    response = await ask(door, path, stream=True, **fields)
    assert response.status_code == 200, response.text
    data = read_events(response.text)
    assert data[-1] == "[DONE]"
    return [strict_json(event) for event in data[:-1]]


def read_events(text: str) -> list[str]:
    frames = text.split("\n\n")
    assert frames[-1] == "", "every event ends with an empty line"
    return [frame.removeprefix("data: ") for frame in frames[:-1] if not frame.startswith(":")]


def join_stream(chunks: list[Json]) -> dict[int, Json]:
    """Per choice: text, logprobs and how it ended, as the whole reply would have them."""
    joined: dict[int, Json] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            entry = joined.setdefault(choice["index"], {"text": "", "logprobs": None, "finish_reason": None})
            entry["text"] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            if choice["logprobs"] is not None:
                entry["logprobs"] = _merge(entry["logprobs"], choice["logprobs"])
            entry["finish_reason"] = choice["finish_reason"] or entry["finish_reason"]
    return joined


def whole(reply: Json) -> dict[int, Json]:
    return {
        choice["index"]: {
            "text": choice["message"]["content"] if "message" in choice else choice["text"],
            "logprobs": choice["logprobs"],
            "finish_reason": choice["finish_reason"],
        }
        for choice in reply["choices"]
    }


def _merge(old: Json | None, new: Json) -> Json:
    if old is None:
        return dict(new)
    return {key: old[key] + value if isinstance(value, list) else value for key, value in new.items()}


def json_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()
