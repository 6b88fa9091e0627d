"""The answer as server-sent events.

    wait for the first output ─▶ headers ─▶ one chunk per Delta ─▶ finish chunk per choice ─▶ [usage] ─▶ [DONE]
      │ error: plain JSON reply      │ silence: a comment line every 15 s
      └ 15 s of silence: headers,    └ error: one `error` event, then the end; never a made-up finish reason
        then comments

Everything that has come by the time of a write goes out in one write. A write that takes too long is a reader that
has stopped reading: its request is cancelled and the connection cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec

from kvrelay.core.errors import Broken, KvrelayError
from kvrelay.core.output import ChoiceFinished, Delta, Output, Started, Summary
from kvrelay.router.http_errors import error_body
from kvrelay.router.openai_call import Call, Json, usage
from kvrelay.router.openai_outputs import ClientGone, Item, Outputs, Send

HEARTBEAT_S = 15.0
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_COMMENT = b": still working\n\n"
_DONE = b"data: [DONE]\n\n"
_MARK = "\0"
"""Stands for the text of a piece; the last of its kind in the event is that."""
_encode = msgspec.json.Encoder().encode


async def stream_reply(call: Call, outputs: Outputs, send: Send) -> None:
    """Raises KvrelayError only while nothing was sent; later errors are told within the stream."""
    items = await _first_items(outputs)
    async with _EventStream(send) as stream:
        await stream.open()
        if not items:
            await stream.write(_COMMENT)
        await _write_all(call, outputs, items, stream)


async def _first_items(outputs: Outputs) -> list[Item]:
    """Everything up to the first output that says more than `Started`; empty if the heartbeat is due before."""
    loop = asyncio.get_running_loop()
    until = loop.time() + HEARTBEAT_S
    while items := await outputs.take(until - loop.time()):
        told = [item for item in items if not isinstance(item[1], Started)]
        if told:
            return told
    return []


async def _write_all(call: Call, outputs: Outputs, items: list[Item], stream: _EventStream) -> None:
    chunks = Chunks(call)
    more: list[Item] | None = items
    while more is not None:
        data = b"".join(chunks.of(prompt, output) for prompt, output in more)
        if data:
            await stream.write(data)
        more = await outputs.take(HEARTBEAT_S)
        if more == []:
            await stream.write(_COMMENT)
    await stream.write(chunks.end())


class Frame:
    """The event around a piece that has nothing but text: written once, for only that differs from token to token."""

    def __init__(self, event_of: Callable[[str], bytes]) -> None:
        self._head, _, self._tail = event_of(_MARK).rpartition(_encode(_MARK))

    def around(self, text: str) -> bytes:
        return self._head + _encode(text) + self._tail


class Chunks:
    """Outputs to events. Remembers which choices have begun: the first piece of each carries its role."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._begun: set[int] = set()
        self._frames: dict[int, Frame] = {}
        """Of choices that have begun and have no logprobs."""
        self._summaries: list[Summary] = []

    def of(self, prompt: int, output: Output) -> bytes:
        """Nothing for outputs that the client does not see."""
        if isinstance(output, Delta):
            return self._piece(self._call.index(prompt, output.choice), output)
        if isinstance(output, ChoiceFinished):
            index = self._call.index(prompt, output.choice)
            return self._event([self._call.shape.last_piece(index, output, is_first=self._begins(index))])
        if isinstance(output, Summary):
            self._summaries.append(output)
        return b""

    def end(self) -> bytes:
        if not self._call.include_usage:
            return _DONE
        return _data({**self._call.shape.chunk([]), "usage": usage(self._summaries)}) + _DONE

    def _piece(self, index: int, delta: Delta) -> bytes:
        if index in self._frames:
            return self._frames[index].around(delta.text) if delta.text else b""
        logprobs = self._call.shape.logprobs(delta) if delta.tokens else None
        if not delta.text and logprobs is None:
            return b""
        event = self._piece_event(index, delta.text, logprobs, is_first=self._begins(index))
        if delta.tokens and logprobs is None:
            self._frames[index] = Frame(lambda text: self._piece_event(index, text, None, is_first=False))
        return event

    def _piece_event(self, index: int, text: str, logprobs: Json | None, *, is_first: bool) -> bytes:
        return self._event([self._call.shape.piece(index, text, logprobs, is_first=is_first)])

    def _begins(self, index: int) -> bool:
        begins = index not in self._begun
        self._begun.add(index)
        return begins

    def _event(self, choices: Sequence[Json]) -> bytes:
        return _data(self._call.shape.chunk(choices))


def _data(event: Json) -> bytes:
    return b"data: " + _encode(event) + b"\n\n"


class _EventStream:
    """The response. Whatever ends its `async with` early is told to the client as an error event, if it listens."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def open(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def __aenter__(self) -> _EventStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """A KvrelayError has been dealt with once it is told; our own bugs go on to be logged."""
        if error is None:
            await self.write(b"", more=False)
            return False
        if not isinstance(error, Exception) or isinstance(error, ClientGone):
            return False
        told = error if isinstance(error, KvrelayError) else Broken("internal error; the server's log has the details")
        await self.write(_data(error_body(told)))
        await self.write(b"", more=False)
        return isinstance(error, KvrelayError)
