"""Around the API: bodies, request ids, routes, clients that leave or do not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvrelay.core.config import RouterSettings
from kvrelay.core.output import GenerateRequest, Output
from kvrelay.router.fakes import FakeFront
from kvrelay.router.front import Readiness
from kvrelay.router.http import build_app
from tests.router_http.support import (
    CHAT,
    COMPLETIONS,
    answer,
    answering,
    ask,
    client,
    events,
    front,
    join_stream,
    json_bytes,
    post,
    tokenizer,
)
from tests.support.virtual_time import run_virtual

JSON = {"content-type": "application/json"}


async def send(door: FakeFront, content: Any, headers: dict[str, str] = JSON) -> httpx.Response:
    async with client(door) as http:
        return await http.post(COMPLETIONS, content=content, headers=headers)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"a"', b'{"prompt": NaN}', b'{"prompt": Infinity}', b'\xff{"prompt": "a"}',
        b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", b'{"prompt": ' + b"[" * 200_000 + b"}",
        b'{"prompt": ' + b"1" * 5000 + b"}",
    ],
)  # fmt: skip
async def test_bodies_that_are_no_request(body: bytes) -> None:
    response = await send(front(), body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_wrong_content_type_is_415(kind: str) -> None:
    response = await send(front(), b"{}", {"content-type": kind} if kind else {})
    assert response.status_code == 415


async def test_a_compressed_body_is_415_and_said_to_be() -> None:
    response = await send(front(), b"\x1f\x8b", {"content-type": "application/json", "content-encoding": "gzip"})
    assert response.status_code == 415
    assert "content-encoding" in response.json()["error"]["message"]


async def test_SEC_03_a_large_body_is_413_and_never_held() -> None:
    num_read = 0

    async def endless() -> Any:
        nonlocal num_read
        for _ in range(1000):
            num_read += 1
            yield b" " * 100_000

    door = front(settings=RouterSettings(max_body_bytes=1_000_000))
    assert (await send(door, endless())).status_code == 413
    assert num_read < 20
    assert (await send(door, b" " * 2_000_000)).status_code == 413


async def test_a_large_valid_body_is_read_on_a_thread() -> None:
    response = await send(front(), json_bytes({"prompt": "a", "max_tokens": 1, "metadata": "x" * 100_000}))
    assert response.status_code == 200


async def test_SCH_07_the_request_id_is_cleaned_echoed_and_never_a_key() -> None:
    door = front()
    given = {"a-b_c.1": "a-b_c.1", "x\ty<z>": "xyz", "a" * 100_000: "a" * 128, "é": None, "": None}
    for header, echoed in given.items():
        async with client(door) as http:
            body = {"prompt": "a", "max_tokens": 1}
            response = await http.post(COMPLETIONS, json=body, headers={"x-request-id": header.encode("latin-1")})
        assert response.status_code == 200
        assert echoed is None or response.headers["x-request-id"] == echoed
        assert 0 < len(response.headers["x-request-id"]) <= 128
    assert len({request.request_id for request in door.requests}) == len(given)
    assert not {request.request_id for request in door.requests} & set(given)


async def test_routes() -> None:
    async with client(front()) as http:
        models = (await http.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["tiny"]
        assert (await http.get("/v1/models/tiny")).json() == models["data"][0]
        for path in ("/health", "/healthz", "/readyz"):
            assert (await http.get(path)).status_code == 200
        for method, path, status in [
            ("GET", "/nothing", 404), ("GET", CHAT, 405), ("POST", "/v1/models", 405), ("GET", "/v1/models/other", 404),
        ]:  # fmt: skip
            response = await http.request(method, path)
            assert response.status_code == status
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert response.headers["x-request-id"]


async def test_not_ready_says_why() -> None:
    async with client(front(state=Readiness(False, "no worker that can decode is attached"))) as http:
        response = await http.get("/readyz")
        assert response.status_code == 503
        assert "attached" in response.json()["reason"]
        assert (await http.get("/healthz")).status_code == 200


class Connection:
    """One HTTP exchange as an ASGI server sees it, with a client that can leave and can stop reading."""

    def __init__(self, door: FakeFront, path: str, body: dict[str, Any]) -> None:
        self.app = build_app(door)
        self.scope: dict[str, Any] = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
            "server": ("kvrelay", 80), "client": ("there", 1), "root_path": "", "asgi": {"version": "3.0"},
        }  # fmt: skip
        self.body = json_bytes({"prompt": "hello", "messages": [{"role": "user", "content": "hello"}], **body})
        self.left = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.sent: list[MutableMapping[str, Any]] = []
        self.is_cut = False
        """The body ends in the middle; what comes next is that the client leaves, if it does."""
        self._given = False

    async def run(self) -> None:
        await self.app(self.scope, self._receive, self._send)

    async def _receive(self) -> MutableMapping[str, Any]:
        if not self._given:
            self._given = True
            body = self.body[:5] if self.is_cut else self.body
            return {"type": "http.request", "body": body, "more_body": self.is_cut}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        await self.reads.wait()
        self.sent.append(message)


def test_a_client_that_leaves_within_its_body_is_no_error() -> None:
    async def story() -> None:
        connection = Connection(front(), CHAT, {})
        connection.is_cut = True
        connection.left.set()
        await connection.run()
        assert connection.sent == []

    run_virtual(story())


def test_a_body_that_does_not_go_on_is_400_after_a_while() -> None:
    async def story() -> None:
        connection = Connection(front(), CHAT, {})
        connection.is_cut = True
        begin = asyncio.get_running_loop().time()
        await connection.run()
        assert asyncio.get_running_loop().time() - begin == pytest.approx(30.0)
        assert connection.sent[0]["status"] == 400
        assert b"5 bytes of the body came" in connection.sent[1]["body"]

    run_virtual(story())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_at", [0, 1, 4])
def test_CAN_01_a_client_that_leaves_cancels_its_request(stream: bool, hold_at: int) -> None:
    async def story() -> None:
        door = front(hold_at=hold_at)
        connection = Connection(door, COMPLETIONS, {"prompt": ["ab", "cd"], "stream": stream})
        running = asyncio.create_task(connection.run())
        await door.holding.wait()
        connection.left.set()
        await running
        assert (door.num_open, door.num_cancelled) == (0, 2)
        assert not any(b"[DONE]" in message.get("body", b"") for message in connection.sent)

    run_virtual(story())


@pytest.mark.parametrize("stream", [False, True])
def test_CAN_01_a_cancelled_handler_cancels_its_request(stream: bool) -> None:
    async def story() -> None:
        door = front(hold_at=3)
        running = asyncio.create_task(Connection(door, CHAT, {"stream": stream}).run())
        await door.holding.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()
        assert (door.num_open, door.num_cancelled) == (0, 1)

    run_virtual(story())


def test_STR_06_a_reader_that_stops_is_cut_after_the_write_timeout() -> None:
    async def story() -> None:
        settings = replace(RouterSettings(), write_timeout_s=30.0)
        door = answering("a" * 200, settings=settings)
        connection = Connection(door, CHAT, {"stream": True})
        connection.reads.clear()
        begin = asyncio.get_running_loop().time()
        await connection.run()
        assert asyncio.get_running_loop().time() - begin == pytest.approx(30.0)
        assert (door.num_open, door.num_cancelled, connection.sent) == (0, 1, [])

    run_virtual(story())


class Staggered(FakeFront):
    """Longer prompts are answered later, and the end of each comes a moment after its last output."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Output, None]:
        await asyncio.sleep(float(len(request.prompt_ids)))
        async for output in super().generate(request):
            yield output
        await asyncio.sleep(0.5)


def test_the_end_of_one_prompt_is_not_the_end_of_all() -> None:
    async def story() -> None:
        call = {"prompt": ["aaa", "a", "aaaaa"], "stream_options": {"include_usage": True}}
        streamed = await events(Staggered(tokenizer()), **call)
        whole_call = await answer(Staggered(tokenizer()), prompt=call["prompt"])
        assert {index: part["text"] for index, part in join_stream(streamed).items()} == {
            choice["index"]: choice["text"] for choice in whole_call["choices"]
        }
        assert len(whole_call["choices"]) == 3
        assert streamed[-1]["usage"] == whole_call["usage"]

    run_virtual(story())


def test_two_requests_do_not_wait_for_each_other() -> None:
    async def story() -> None:
        held, other = front(hold_at=2), front()
        running = asyncio.create_task(Connection(held, CHAT, {"stream": True}).run())
        await held.holding.wait()
        assert (await ask(other, CHAT)).status_code == 200
        held.go_on.set()
        await running
        assert held.num_cancelled == 0

    run_virtual(story())


async def test_nothing_starts_before_all_prompts_are_valid() -> None:
    door = front()
    response = await post(door, COMPLETIONS, {"prompt": ["a", "b" * 300]})
    assert response.status_code == 400
    assert door.requests == []
