"""`x-request-id`: the client's own name for a request, cleaned, echoed, and never used as a key (SCH-07)."""

from __future__ import annotations

import uuid
from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
MAX_CHARS = 128
_KEY = "kvrelay.request_id"
_ALLOWED = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:/+=@-")


class RequestIdMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(scope: MutableMapping[str, Any]) -> str:
    """The cleaned header, or a new id; the same for every call on one request."""
    request_id: str | None = scope.get(_KEY)
    if request_id is None:
        given = next((value for name, value in scope["headers"] if name == HEADER.encode()), b"")
        request_id = scope[_KEY] = clean(given.decode("latin-1")) or f"req-{uuid.uuid4().hex}"
    return request_id


def clean(text: str) -> str:
    return "".join(character for character in text[: 4 * MAX_CHARS] if character in _ALLOWED)[:MAX_CHARS]
