"""The error tree as HTTP: a status and `{"error": {"message", "type", "param", "code"}}`, whatever went wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvrelay.core.errors import (
    BadRequest,
    Broken,
    DeadlineExceeded,
    KvrelayError,
    Overloaded,
    TooLarge,
    Unauthorised,
    Unavailable,
    UnknownModel,
    WrongContentType,
)
from kvrelay.router.http_request_id import HEADER, request_id_of

_STATUS: tuple[tuple[type[KvrelayError], int, str], ...] = (
    (BadRequest, 400, "invalid_request_error"),
    (Unauthorised, 401, "authentication_error"),
    (UnknownModel, 404, "invalid_request_error"),
    (TooLarge, 413, "invalid_request_error"),
    (WrongContentType, 415, "invalid_request_error"),
    (Overloaded, 429, "rate_limit_error"),
    (Unavailable, 503, "service_unavailable_error"),
    (DeadlineExceeded, 504, "timeout_error"),
)


def status_of(error: KvrelayError) -> int:
    return _lookup(error)[0]


def error_body(error: KvrelayError) -> dict[str, Any]:
    return _body(error.message, _lookup(error)[1], error.param, error.code)


def error_response(error: KvrelayError) -> JSONResponse:
    headers = {}
    if isinstance(error, Overloaded | Unavailable):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthorised):
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_of(error), headers=headers)


async def on_kvrelay_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KvrelayError)
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the routing, in the same form as everything else."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return _plain(error.status_code, message, "invalid_request_error", code, error.headers)


async def on_bug(request: Request, error: Exception) -> Response:
    """Ours. The server logs it; the client learns only that. Sent outside the middleware, so it adds the id itself."""
    response = error_response(Broken("internal error; the server's log has the details"))
    response.headers[HEADER] = request_id_of(request.scope)
    return response


def _lookup(error: KvrelayError) -> tuple[int, str]:
    for kind, status, name in _STATUS:
        if isinstance(error, kind):
            return status, name
    return 500, "server_error"


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _plain(
    status: int, message: str, kind: str, code: str, headers: Mapping[str, str] | None
) -> JSONResponse:
    return JSONResponse(_body(message, kind, None, code), status, headers=dict(headers or {}))
