"""The OpenAI API over HTTP, in front of any `FrontDoor`.

    POST ─▶ request id ─▶ body (size, type, JSON) ─▶ fields and prompts ─▶ Call ─▶ generate ─▶ reply │ event stream
                               └───────── errors: JSON with the status of the error tree ─────────┘

Nothing starts before everything is valid. A client that leaves cancels its work: behind a proxy that arrives as a
cancellation of the handler, without one as a message that `Outputs` watches for.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvrelay.core.errors import KvrelayError, UnknownModel
from kvrelay.core.ids import RequestId
from kvrelay.router.front import FrontDoor, ModelCard
from kvrelay.router.http_body import parse_object, read_body
from kvrelay.router.http_errors import error_response, on_bug, on_http_error, on_kvrelay_error
from kvrelay.router.http_request_id import RequestIdMiddleware
from kvrelay.router.openai_call import Call, Json
from kvrelay.router.openai_chat import chat_call
from kvrelay.router.openai_completions import completions_call
from kvrelay.router.openai_outputs import Bounded, ClientGone, Outputs
from kvrelay.router.openai_reply import whole_reply
from kvrelay.router.openai_stream import stream_reply

LARGE_BODY_BYTES = 32 << 10
"""From here on a body is read and tokenised on a thread, so that other streams do not wait for it."""
CallReader = Callable[[FrontDoor, Json, RequestId, int, str | None], Call]
_encode = msgspec.json.Encoder().encode


def build_app(front: FrontDoor, *, unix_time: Callable[[], float] = time.time) -> Starlette:
    pages = _Pages(front)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", _Endpoint(front, chat_call, unix_time), methods=["POST"]),
            Route("/v1/completions", _Endpoint(front, completions_call, unix_time), methods=["POST"]),
            Route("/v1/models", pages.models),
            Route("/v1/models/{model:path}", pages.model),
            Route("/healthz", pages.health),
            Route("/health", pages.health),
            Route("/readyz", pages.ready),
        ],
        middleware=[Middleware(RequestIdMiddleware)],
        exception_handlers={KvrelayError: on_kvrelay_error, HTTPException: on_http_error, Exception: on_bug},
    )


class _Endpoint:
    """One generating route, as an ASGI application."""

    def __init__(self, front: FrontDoor, read_call: CallReader, unix_time: Callable[[], float]) -> None:
        self._front = front
        self._read_call = read_call
        self._unix_time = unix_time

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            call = await self._call(Request(scope, receive))
            async with Outputs(self._front, call, receive) as outputs:
                await self._answer(call, outputs, scope, receive, send)
        except (ClientGone, ClientDisconnect):
            pass

    async def _call(self, request: Request) -> Call:
        body = await read_body(request, self._front.settings.max_body_bytes)
        await self._front.until_known()
        session_header = request.headers.get("x-session-id")
        if len(body) < LARGE_BODY_BYTES:
            return self._read(body, session_header)
        return await asyncio.to_thread(self._read, body, session_header)

    def _read(self, body: bytes, session_header: str | None) -> Call:
        request_id = RequestId(uuid.uuid4().hex)
        return self._read_call(self._front, parse_object(body), request_id, int(self._unix_time()), session_header)

    async def _answer(self, call: Call, outputs: Outputs, scope: Scope, receive: Receive, send: Send) -> None:
        with closing(Bounded(send, self._front.settings.write_timeout_s)) as send_in_time:
            if call.stream:
                await stream_reply(call, outputs, send_in_time)
            else:
                response = _json(await whole_reply(call, outputs))
                await response(scope, receive, send_in_time)


class _Pages:
    """The routes that only tell."""

    def __init__(self, front: FrontDoor) -> None:
        self._front = front

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [_model(self._front.model_card())]})

    async def model(self, request: Request) -> Response:
        card = self._front.model_card()
        name = request.path_params["model"]
        if name != card.served_name:
            return error_response(UnknownModel(f"the model {name[:256]!r} is not served here", param="model"))
        return _json(_model(card))

    async def health(self, request: Request) -> Response:
        """Alive: this loop answers. Says nothing about workers."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        readiness = self._front.readiness()
        if readiness.ready:
            return _json({"status": "ready"})
        return _json({"status": "not ready", "reason": readiness.reason}, status=503)


def _model(card: ModelCard) -> dict[str, Any]:
    known = {"max_model_len": card.max_context} if card.max_context else {}
    return {"id": card.served_name, "object": "model", "created": card.created, "owned_by": "kvrelay", **known}


def _json(content: Any, status: int = 200) -> Response:
    return Response(_encode(content), status, media_type="application/json")
