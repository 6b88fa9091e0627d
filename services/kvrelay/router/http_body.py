"""A request's body: read up to a bound, and read as strict JSON. Each fault has its own error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, NoReturn

from starlette.requests import Request

from kvrelay.core.errors import BadRequest, TooLarge, WrongContentType

MAX_DEPTH = 64
"""Objects and lists inside each other. The code behind walks values recursively."""


BODY_PATIENCE_S = 30.0
"""How long the next part of a body may take."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises WrongContentType, or TooLarge as soon as the bound is passed: a large body is never held.

    BadRequest if the rest does not come, starlette's ClientDisconnect if the client has left.
    """
    _check_content_type(request.headers.get("content-type", ""))
    _check_encoding(request.headers.get("content-encoding", ""))
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    parts = request.stream()
    try:
        while True:
            async with asyncio.timeout(BODY_PATIENCE_S):
                part = await anext(parts, None)
            if part is None:
                return bytes(body)
            body += part
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
    except TimeoutError:
        raise BadRequest(f"{len(body)} bytes of the body came, and nothing more for {BODY_PATIENCE_S:g} s") from None


def parse_object(body: bytes) -> dict[str, Any]:
    """Strict: UTF-8, no NaN or Infinity, no deep nesting, an object at the top. Raises BadRequest."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not valid UTF-8: byte {error.start}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise BadRequest(f"the body is not valid JSON: {error.msg} at {where}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise BadRequest(f"the body holds a number that cannot be read: {str(error)[:80]}") from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    _check_depth(value)
    return value


def _check_content_type(header: str) -> None:
    kind = header.split(";")[0].strip().lower()
    if kind != "application/json":
        found = f"found {kind[:60]!r}" if kind else "found none"
        raise WrongContentType(f"send the body with the header `content-type: application/json`; {found}")


def _check_encoding(header: str) -> None:
    if header.strip().lower() not in ("", "identity"):
        raise WrongContentType(f"bodies are read without `content-encoding`; found {header[:60]!r}")


def _refuse_constant(name: str) -> NoReturn:
    raise BadRequest(f"the body is not valid JSON: {name} is no JSON number")


def _check_depth(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for container in level for child in _children(container)]
        if not level:
            return
    raise _too_deep()


def _children(container: Any) -> Iterator[Any]:
    values = container.values() if isinstance(container, dict) else container
    return (value for value in values if isinstance(value, dict | list))


def _too_deep() -> BadRequest:
    return BadRequest(f"the body nests objects and lists more than {MAX_DEPTH} deep")


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the body is larger than the limit of {max_bytes} bytes")
