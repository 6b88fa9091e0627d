"""Where a handler's exception becomes a status: the only broad `except` of the RPC side.

A KvrelayError becomes its own status with the trailer; anything else is our bug: logged with its trace, answered
with INTERNAL and a message that gives nothing away. Cancellation and `context.abort` pass through.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from kvrelay.core.errors import Broken, KvrelayError
from kvrelay.rpc.status import set_status

log = logging.getLogger(__name__)

Handler = Callable[[Any, Any], Any]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            inner = getattr(handler, kind)
            if inner is not None:
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                return make(guarded(inner, method), handler.request_deserializer, handler.response_serializer)
        return handler


def guarded(inner: Handler, method: str) -> Handler:
    """The same handler, with its exceptions turned into a status."""
    if inspect.isasyncgenfunction(inner):
        return _guarded_generator(inner, method)
    return _guarded_coroutine(inner, method)


def _guarded_coroutine(inner: Handler, method: str) -> Handler:
    async def call(request: Any, context: Any) -> Any:
        try:
            return await inner(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001
            answer_error(context, method, error)
            return None

    return call


def _guarded_generator(inner: Handler, method: str) -> Handler:
    async def call(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async with aclosing(inner(request, context)) as responses:
                async for response in responses:
                    yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001
            answer_error(context, method, error)

    return call


def answer_error(context: Any, method: str, error: Exception) -> None:
    if isinstance(error, KvrelayError):
        set_status(context, error)
        return
    log.error("unexpected error in %s", method, exc_info=error)
    set_status(context, Broken("internal error; the server's log has the details"))
