"""What is put under load: any server with the OpenAI API, or ours over gRPC. One seam, and a fake behind it."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from kvrelay.client import AsyncClient, Delta, KvrelayError, RetryPolicy, Summary
from kvrelay.core.errors import ConfigError
from kvrelay_loadtest.sse import DONE, SseParser


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: str
    max_tokens: int
    session_id: str = ""
    ignore_eos: bool = True
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Piece:
    """Output as it arrives, or at the end the server's own counts."""

    text: str = ""
    num_tokens: int = 0
    """Known from some servers; 0 elsewhere."""
    usage: tuple[int, int] | None = None
    """(prompt tokens, output tokens)."""


class TargetFailed(Exception):
    """`kind` is what the report counts by."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class Target(Protocol):
    def stream(self, ask: Ask) -> AsyncIterator[Piece]:
        """Raises TargetFailed."""
        ...

    async def close(self) -> None: ...


class OpenAiTarget:
    """`/v1/completions` or `/v1/chat/completions`, streamed."""

    def __init__(
        self, url: str, *, model: str = "", chat: bool = False, api_key: str = "", timeout_s: float = 120.0
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=512)
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, limits=limits, timeout=timeout_s,
            trust_env=False,
        )  # fmt: skip
        self._model = model
        self._chat = chat

    async def close(self) -> None:
        await self._http.aclose()

    async def only_model(self) -> str:
        """Raises ConfigError if nobody answers."""
        try:
            answer = await self._http.get("/v1/models")
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            raise ConfigError(f"{self._http.base_url} does not tell its model: {error!r}; give --model") from error

    async def stream(self, ask: Ask) -> AsyncIterator[Piece]:
        if not self._model:
            self._model = await self.only_model()
        path = "/v1/chat/completions" if self._chat else "/v1/completions"
        headers = {"x-session-id": ask.session_id} if ask.session_id else {}
        try:
            async with self._http.stream("POST", path, json=self.body(ask), headers=headers) as response:
                if response.status_code != 200:
                    raise TargetFailed(f"http_{response.status_code}")
                async for piece in _pieces(response):
                    yield piece
        except httpx.TimeoutException:
            raise TargetFailed("timeout") from None
        except httpx.ConnectError:
            raise TargetFailed("connect") from None
        except httpx.HTTPError as error:
            raise TargetFailed(type(error).__name__.lower()) from error

    def body(self, ask: Ask) -> dict[str, Any]:
        content = {"messages": [{"role": "user", "content": ask.prompt}]} if self._chat else {"prompt": ask.prompt}
        body = {
            "model": self._model, "max_tokens": ask.max_tokens, "temperature": ask.temperature, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        return {**body, **content, **({"ignore_eos": True} if ask.ignore_eos else {})}


async def _pieces(response: httpx.Response) -> AsyncIterator[Piece]:
    parser = SseParser()
    async for chunk in response.aiter_raw():
        for event, data in parser.feed(chunk):
            if event == "error":
                raise TargetFailed("sse_error")
            if data == DONE:
                return
            piece = piece_of(json.loads(data))
            if piece is not None:
                yield piece
    raise TargetFailed("truncated")


def piece_of(chunk: dict[str, Any]) -> Piece | None:
    """None for a chunk without output (a role, a finish reason). Raises TargetFailed for an error object."""
    if "error" in chunk:
        raise TargetFailed("sse_error")
    usage = chunk.get("usage")
    counts = (usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)) if usage else None
    choices = chunk.get("choices") or [{}]
    text = choices[0].get("text") or (choices[0].get("delta") or {}).get("content") or ""
    return Piece(text, usage=counts) if text or counts else None


class GrpcTarget:
    """Our own API, over the SDK, without its retries: a failure is to be counted."""

    def __init__(
        self, address: str, *, model: str = "", chat: bool = False, api_key: str = "", timeout_s: float = 120.0
    ) -> None:
        retry = RetryPolicy(max_attempts=1)
        self._client = AsyncClient(address, api_key=api_key, timeout_s=timeout_s, retry=retry)
        self._model = model
        self._chat = chat

    async def close(self) -> None:
        await self._client.close()

    async def stream(self, ask: Ask) -> AsyncIterator[Piece]:
        content = [{"role": "user", "content": ask.prompt}]
        model = self._model or (await self._client.models())[0].id
        self._model = model
        stream = (
            self._client.chat(
                content, model=model, max_tokens=ask.max_tokens, temperature=ask.temperature,
                ignore_eos=ask.ignore_eos, session_id=ask.session_id,
            )
            if self._chat
            else self._client.generate(
                ask.prompt, model=model, max_tokens=ask.max_tokens, temperature=ask.temperature,
                ignore_eos=ask.ignore_eos, session_id=ask.session_id,
            )
        )  # fmt: skip
        try:
            async with stream:
                async for event in stream:
                    if isinstance(event, Delta) and (event.text or event.tokens):
                        yield Piece(event.text, len(event.tokens))
                    elif isinstance(event, Summary):
                        yield Piece(usage=(event.num_prompt_tokens, event.num_output_tokens))
        except KvrelayError as error:
            raise TargetFailed(_snake(type(error).__name__)) from error


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


def open_target(url: str, *, model: str, chat: bool, api_key: str, timeout_s: float) -> Target:
    """`grpc://host:port`, or anything httpx can call."""
    parts = urlsplit(url)
    if parts.scheme == "grpc":
        return GrpcTarget(parts.netloc, model=model, chat=chat, api_key=api_key, timeout_s=timeout_s)
    return OpenAiTarget(url, model=model, chat=chat, api_key=api_key, timeout_s=timeout_s)


def check_url(url: str, *, allow_remote: bool) -> None:
    """Load belongs on one's own machine. Raises ConfigError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "grpc") or not parts.hostname:
        raise ConfigError(f"--url: expected http://host:port or grpc://host:port, found {url!r}")
    if not allow_remote and not is_loopback(parts.hostname):
        raise ConfigError(f"{parts.hostname} is not this machine; give --allow-remote if its owner knows of the load")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
