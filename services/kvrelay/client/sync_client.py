"""The blocking client. Safe to share between threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
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


class Stream:
    """The events of one request. Leaving it early (`close`, end of `with`) cancels the call.

    >>> with client.generate("Once upon a time", max_tokens=20) as stream:  # doctest: +SKIP
    ...     for event in stream:
    ...         if isinstance(event, Delta):
    ...             print(event.text, end="", flush=True)

    After a `break` outside `with` the call is cancelled as soon as the stream is garbage.
    """

    def __init__(self, events: Generator[Event, None, None]) -> None:
        self._events = events

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        return next(self._events)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._events.close()

    def text(self, choice: int = 0) -> str:
        """Wait for the end; the rest of the answer of one choice as one string."""
        return joined_text(self, choice)


class Client:
    """Talks to a kvrelay server over gRPC.

    >>> client = Client("127.0.0.1:9000")  # doctest: +SKIP
    >>> client.generate("The capital of Japan is", max_tokens=4).text()  # doctest: +SKIP
    ' Tokyo.'

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
        self._pool: ChannelPool[grpc.Channel] = ChannelPool(target_list(target), self._open)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what is still running."""
        for channel in self._pool.close():
            channel.close()

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Stream:
        """Continue a text or a list of token ids. Nothing is sent before the first event is asked for."""
        return self._stream("Generate", messages.generate_request(prompt, options), options)

    def chat(self, conversation: Conversation, **options: Unpack[Options]) -> Stream:
        """Answer a conversation, `[{"role": "user", "content": "Hello"}]`, or one question as a plain string."""
        return self._stream("Chat", messages.chat_request(conversation, options), options)

    def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool = True) -> list[int]:
        request = messages.tokenize_request(text, model, add_special_tokens)
        return self._unary("Tokenize", request, lambda answer: list(answer.ids))

    def detokenize(self, ids: Sequence[int], *, model: str = "") -> str:
        return self._unary("Detokenize", messages.detokenize_request(ids, model), lambda answer: str(answer.text))

    def models(self) -> list[ModelInfo]:
        return self._unary("ListModels", pb.ListModelsRequest(), messages.models_from_pb)

    def _stream(self, method: str, message: messages.AskMessage, options: Options) -> Stream:
        timeout_s = options.get("timeout_s", self._timeout_s)
        return Stream(self._exchange(method, message, timeout_s, options.get("request_id", "")))

    def _exchange(
        self, method: str, message: messages.AskMessage, timeout_s: float, request_id: str
    ) -> Generator[Event, None, None]:
        attempts = Attempts(self._retry, timeout_s, self._clock)
        exchange = Exchange(message, attempts)
        while not exchange.is_over:
            try:
                yield from self._one_call(method, exchange, attempts, request_id)
            except KvrelayError as error:
                pause = exchange.pause_after(error)
                if isinstance(pause, Summary):
                    yield pause
                else:
                    time.sleep(pause)

    def _one_call(
        self, method: str, exchange: Exchange, attempts: Attempts, request_id: str
    ) -> Generator[Event, None, None]:
        left_s = attempts.left_s()
        with self._pool.lease(attempts.num_failed) as channel:
            ask = getattr(_stub(channel), method)
            call = ask(exchange.request(), timeout=left_s, metadata=metadata(self._api_key, left_s, request_id))
            try:
                for message in call:
                    event = exchange.receive(message)
                    if event is not None:
                        yield event
            except grpc.RpcError as error:
                raise error_of(error) from error
            finally:
                call.cancel()
        summary = exchange.ended()
        if summary is not None:
            yield summary

    def _unary(self, method: str, request: Any, read: Callable[[Any], T]) -> T:
        attempts = Attempts(self._retry, self._timeout_s, self._clock)
        while True:
            left_s = attempts.left_s()
            try:
                with self._pool.lease(attempts.num_failed) as channel:
                    ask = getattr(_stub(channel), method)
                    return read(ask(request, timeout=left_s, metadata=metadata(self._api_key, left_s)))
            except grpc.RpcError as error:
                time.sleep(attempts.pause_after(error_of(error)))

    def _open(self, target: str) -> grpc.Channel:
        options = channel_options(public=True)
        if self._tls is not None:
            return grpc.secure_channel(target, self._tls.credentials(), options=options)
        return grpc.insecure_channel(target, options=options)


def _stub(channel: grpc.Channel) -> pb_grpc.InferenceStub:
    return pb_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
