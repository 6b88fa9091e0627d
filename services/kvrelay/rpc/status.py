"""The one table between our errors and gRPC's, and the `kvrelay-error-bin` trailer that carries the rest.

    server   KvrelayError ─▶ status code + details + trailer (ErrorDetail)
    client   status code + details + trailer ─▶ the same KvrelayError

The trailer tells kinds apart that share a status code. Without one, the answer did not come from our code:
a proxy in between, a dead connection, a message over gRPC's own limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from kvrelay.core.errors import (
    BadRequest,
    Broken,
    DeadlineExceeded,
    KvrelayError,
    NoRoom,
    Overloaded,
    QuotaExceeded,
    Rejected,
    TooLarge,
    Unauthorised,
    Unavailable,
    UnknownModel,
    WrongContentType,
)
from kvrelay.pb.common_pb2 import ErrorDetail

ERROR_TRAILER = "kvrelay-error-bin"
MAX_MESSAGE_CHARS = 1500
"""Trailers are HTTP/2 headers: peers may refuse more than 8 KiB, and the message travels twice."""
DEFAULT_RETRY_AFTER_S = 1.0

STATUS: dict[type[KvrelayError], grpc.StatusCode] = {
    BadRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Unauthorised: grpc.StatusCode.UNAUTHENTICATED,
    UnknownModel: grpc.StatusCode.NOT_FOUND,
    TooLarge: grpc.StatusCode.INVALID_ARGUMENT,
    WrongContentType: grpc.StatusCode.INVALID_ARGUMENT,
    Rejected: grpc.StatusCode.INVALID_ARGUMENT,
    NoRoom: grpc.StatusCode.RESOURCE_EXHAUSTED,
    QuotaExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Broken: grpc.StatusCode.INTERNAL,
    KvrelayError: grpc.StatusCode.INTERNAL,
}

_BY_CODE: dict[str, type[KvrelayError]] = {}
_BY_STATUS: dict[grpc.StatusCode, type[KvrelayError]] = {
    grpc.StatusCode.PERMISSION_DENIED: Unauthorised,
    grpc.StatusCode.OUT_OF_RANGE: BadRequest,
    grpc.StatusCode.FAILED_PRECONDITION: BadRequest,
    # Our servers never answer these two: a proxy does for a dead upstream, gRPC for a call cut short.
    grpc.StatusCode.UNKNOWN: Unavailable,
    grpc.StatusCode.CANCELLED: Unavailable,
}
for _kind, _status in STATUS.items():
    _BY_CODE.setdefault(_kind.code, _kind)
    if _kind not in (NoRoom, QuotaExceeded):
        _BY_STATUS.setdefault(_status, _kind)


class StatusContext(Protocol):
    """What grpc.aio's, grpc's and Serve's call contexts have in common."""

    def set_code(self, code: Any) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, trailing_metadata: Any) -> None: ...


class CallStatus(Protocol):
    """The client's view of an ended call: `grpc.aio.AioRpcError`, or a sync call that raised."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Iterable[tuple[str, Any]] | None: ...


def status_of(error: KvrelayError) -> grpc.StatusCode:
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def detail_of(error: KvrelayError) -> ErrorDetail:
    retry_after_s = error.retry_after_s if isinstance(error, Overloaded | Unavailable) else 0.0
    return ErrorDetail(
        code=error.code,
        message=error.message[:MAX_MESSAGE_CHARS],
        param=error.param or "",
        retry_after_s=retry_after_s,
    )


def set_status(context: StatusContext, error: KvrelayError) -> None:
    """End the call with this error: call it, then *return* from the handler; raising would lose the trailer."""
    detail = detail_of(error)
    context.set_code(status_of(error))
    context.set_details(detail.message)
    context.set_trailing_metadata(((ERROR_TRAILER, detail.SerializeToString()),))


def error_from_call(call: CallStatus) -> KvrelayError:
    """What a failed call means, for `except grpc.aio.AioRpcError as error: raise error_from_call(error) from error`."""
    return error_from_status(call.code(), call.details() or "", call.trailing_metadata() or ())


def error_from_status(
    status: grpc.StatusCode, details: str, trailing_metadata: Iterable[tuple[str, Any]] = ()
) -> KvrelayError:
    detail = _detail(trailing_metadata)
    if detail is not None:
        kind = _BY_CODE.get(detail.code) or _BY_STATUS.get(status, Broken)
        return _build(kind, detail)
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return TooLarge(details)
    kind = _BY_STATUS.get(status, Broken)
    message = details or status.name.lower().replace("_", " ")
    return _build(kind, ErrorDetail(code=kind.code, message=message, retry_after_s=DEFAULT_RETRY_AFTER_S))


def _detail(trailing_metadata: Iterable[tuple[str, Any]]) -> ErrorDetail | None:
    for name, value in trailing_metadata:
        if name == ERROR_TRAILER and isinstance(value, bytes):
            try:
                return ErrorDetail.FromString(value)
            except DecodeError:
                return None
    return None


def _build(kind: type[KvrelayError], detail: ErrorDetail) -> KvrelayError:
    error: KvrelayError
    if issubclass(kind, Overloaded | Unavailable):
        error = kind(detail.message, retry_after_s=detail.retry_after_s)
    else:
        error = kind(detail.message)
    error.param = detail.param or None
    error.code = detail.code
    return error
