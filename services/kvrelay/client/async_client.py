"""The asyncio client. Belongs to the event loop in which it is first used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar, Unpack

import grpc

from kvrelay.client import _messages as messages
from kvrelay.client._channels import ChannelPool
from kvrelay.client._protocol import Attempts, Exchange, error_of, joined_text, metadata, target_list
from kvrelay.client.events import Event, ModelInfo, Summary
from kvrelay.client.options import DEFAULT_TIMEOUT_S, Conversation, Options, RetryPolicy, Tls
from kvrelay.core.clock import SystemClock
from kvrelay.core.errors import KvrelayError
from kvrelay.pb import inference_pb2 as pb
from kvrelay.pb import inference_pb2_grpc as pb_grpc
from kvrelay.rpc.limits import channel_options

T = TypeVar("T")


class AsyncStream:
    """The events of one request. Leaving it (`aclose`, end of `async with`, a cancelled task) cancels the call.

    >>> async with client.generate("Once upon a time", max_tokens=20) as stream:  # doctest: +SKIP
    ...     async for event in stream:
    ...         if isinstance(event, Delta):
    ...             print(event.text, end="", flush=True)

    After a `break` outside `async with` the call is cancelled as soon as the stream is garbage.
    """

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        self._events = events

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._events.aclose()

    async def text(self, choice: int = 0) -> str:
        """Wait for the end; the rest of the answer of one choice as one string."""
        return joined_text([event async for event in self], choice)


class AsyncClient:
    """Talks to a kvrelay server over gRPC.

    >>> async with AsyncClient("127.0.0.1:9000") as client:  # doctest: +SKIP
    ...     print(await client.chat([{"role": "user", "content": "Name the capital of Japan."}]).text())

    Several targets are tried in turn when one fails. Errors are those of `kvrelay.core.errors`.
    """

    def __init__(
        self,
        target: str | Sequence[str] = "127.0.0.1:9000",
        *,
        api_key: str = "",
        tls: Tls | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._api_key = api_key
        self._tls = tls
        self._timeout_s = timeout_s
        self._retry = retry or RetryPolicy()
        self._clock = SystemClock()
        self._pool: ChannelPool[grpc.aio.Channel] = ChannelPool(target_list(target), self._open)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what is still running."""
        await asyncio.gather(*(channel.close(None) for channel in self._pool.close()))

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> AsyncStream:
        """Continue a text or a list of token ids. Nothing is sent before the first event is asked for."""
        return self._stream("Generate", messages.generate_request(prompt, options), options)

    def chat(self, conversation: Conversation, **options: Unpack[Options]) -> AsyncStream:
        """Answer a conversation, `[{"role": "user", "content": "Hello"}]`, or one question as a plain string."""
        return self._stream("Chat", messages.chat_request(conversation, options), options)

    async def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool = True) -> list[int]:
        request = messages.tokenize_request(text, model, add_special_tokens)
        return await self._unary("Tokenize", request, lambda answer: list(answer.ids))

    async def detokenize(self, ids: Sequence[int], *, model: str = "") -> str:
        request = messages.detokenize_request(ids, model)
        return await self._unary("Detokenize", request, lambda answer: str(answer.text))

    async def models(self) -> list[ModelInfo]:
        return await self._unary("ListModels", pb.ListModelsRequest(), messages.models_from_pb)

    def _stream(self, method: str, message: messages.AskMessage, options: Options) -> AsyncStream:
        timeout_s = options.get("timeout_s", self._timeout_s)
        return AsyncStream(self._exchange(method, message, timeout_s, options.get("request_id", "")))

    async def _exchange(
        self, method: str, message: messages.AskMessage, timeout_s: float, request_id: str
    ) -> AsyncGenerator[Event, None]:
        attempts = Attempts(self._retry, timeout_s, self._clock)
        exchange = Exchange(message, attempts)
        while not exchange.is_over:
            try:
                async with aclosing(self._one_call(method, exchange, attempts, request_id)) as events:
                    async for event in events:
                        yield event
            except KvrelayError as error:
                pause = exchange.pause_after(error)
                if isinstance(pause, Summary):
                    yield pause
                else:
                    await asyncio.sleep(pause)

    async def _one_call(
        self, method: str, exchange: Exchange, attempts: Attempts, request_id: str
    ) -> AsyncGenerator[Event, None]:
        left_s = attempts.left_s()
        with self._pool.lease(attempts.num_failed) as channel:
            ask = getattr(_stub(channel), method)
            call = ask(exchange.request(), timeout=left_s, metadata=metadata(self._api_key, left_s, request_id))
            try:
                async for message in call:
                    event = exchange.receive(message)
                    if event is not None:
                        yield event
            except grpc.aio.AioRpcError as error:
                raise error_of(error) from error
            except asyncio.CancelledError:
                self._check_open()
                raise
            finally:
                call.cancel()
        summary = exchange.ended()
        if summary is not None:
            yield summary

    async def _unary(self, method: str, request: Any, read: Callable[[Any], T]) -> T:
        attempts = Attempts(self._retry, self._timeout_s, self._clock)
        while True:
            left_s = attempts.left_s()
            try:
                with self._pool.lease(attempts.num_failed) as channel:
                    ask = getattr(_stub(channel), method)
                    return read(await ask(request, timeout=left_s, metadata=metadata(self._api_key, left_s)))
            except grpc.aio.AioRpcError as error:
                await asyncio.sleep(attempts.pause_after(error_of(error)))

    def _check_open(self) -> None:
        """A call that `close` cut short looks like a cancelled task, which it is not."""
        task = asyncio.current_task()
        if self._pool.is_closed and (task is None or not task.cancelling()):
            raise RuntimeError("the client is closed")

    def _open(self, target: str) -> grpc.aio.Channel:
        options = channel_options(public=True)
        if self._tls is not None:
            return grpc.aio.secure_channel(target, self._tls.credentials(), options=options)
        return grpc.aio.insecure_channel(target, options=options)


def _stub(channel: grpc.aio.Channel) -> pb_grpc.InferenceStub:
    return pb_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
