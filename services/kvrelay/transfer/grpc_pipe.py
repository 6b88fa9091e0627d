"""The gRPC pipe: `KvTransfer.Push` on both ends.

One channel per receiver address and set of certificates, shared by its Pushes and kept for the next one; the least
recently used idle channel goes when there are too many. Keepalive ends a call to a dead process within a few seconds.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvrelay.core.errors import BadRequest
from kvrelay.core.handoff import MAX_SLAB_BYTES, Commit, Receiver
from kvrelay.pb import transfer_pb2 as pb
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.frames import Frame
from kvrelay.rpc.slab_bytes import frame_from_bytes, frame_to_bytes
from kvrelay.rpc.tls import Tls
from kvrelay.transfer.pipes import Accept, PushCall
from kvrelay.transfer.words import PipeBroken, PushAnswer, PushFailed

MAX_FRAME_BYTES = 4 * MAX_SLAB_BYTES
"""A slab and its header, or a commit with the tokens and top logprobs of many choices."""
MAX_CHANNELS = 64
SERVICE = pb.DESCRIPTOR.services_by_name["KvTransfer"].full_name
PUSH = f"/{SERVICE}/Push"
Line = tuple[str, int]
"""Address, and the generation of certificates that the channel was opened with."""


class GrpcPipe:
    """Belongs to one event loop; owns its channels."""

    def __init__(self, tls: Tls | None = None) -> None:
        self._tls = tls
        self._channels: OrderedDict[Line, grpc.aio.Channel] = OrderedDict()
        self._num_calls: dict[Line, int] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def connect(self, receiver: Receiver) -> PushCall:
        line = (receiver.address, 0 if self._tls is None else self._tls.generation)
        push = self._channel(line).stream_unary(
            PUSH, request_serializer=frame_to_bytes, response_deserializer=pb.PushResult.FromString
        )
        call = push()
        self._num_calls[line] = self._num_calls.get(line, 0) + 1
        call.add_done_callback(lambda _: self._call_ended(line))
        return GrpcCall(call)

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), OrderedDict()
        await asyncio.gather(*(channel.close(None) for channel in channels), *self._closing)

    def _channel(self, line: Line) -> grpc.aio.Channel:
        if line not in self._channels:
            self._channels[line] = open_channel(line[0], max_message_bytes=MAX_FRAME_BYTES, tls=self._tls)
        self._channels.move_to_end(line)
        return self._channels[line]

    def _call_ended(self, line: Line) -> None:
        self._num_calls[line] -= 1
        if not self._num_calls[line]:
            del self._num_calls[line]
        idle = [known for known in self._channels if known not in self._num_calls]
        for known in idle[: max(0, len(self._channels) - MAX_CHANNELS)]:
            task = asyncio.get_running_loop().create_task(self._channels.pop(known).close(None))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


class GrpcCall:
    """A `PushCall` over one stream-unary call."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, frame: Frame) -> None:
        try:
            await self._call.write(frame)
            if isinstance(frame, Commit):
                await self._call.done_writing()
        except grpc.aio.AioRpcError as error:
            raise PipeBroken(_reason(error)) from error
        except asyncio.InvalidStateError as error:
            raise PipeBroken("the receiver has ended the call") from error
        except asyncio.CancelledError:
            _raise_if_cancelled()
            raise PipeBroken("the call was cancelled") from None

    async def answer(self) -> PushAnswer:
        try:
            result = await self._call
        except grpc.aio.AioRpcError as error:
            raise PipeBroken(_reason(error)) from error
        except asyncio.CancelledError:
            _raise_if_cancelled()
            raise PipeBroken("the call was cancelled") from None
        return PushAnswer(result.committed, result.error, result.retryable)

    def cancel(self) -> None:
        self._call.cancel()


class GrpcPushService:
    """The receiver's end: hands each Push call to `accept` as a stream of frames."""

    def __init__(self, accept: Accept) -> None:
        self._accept = accept

    def add_to(self, server: grpc.aio.Server) -> None:
        """As the generated code would, but the frames arrive as bytes (`rpc/slab_bytes.py`)."""
        method = grpc.stream_unary_rpc_method_handler(
            self.Push, request_deserializer=bytes, response_serializer=pb.PushResult.SerializeToString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Push": method}),))

    async def Push(self, request_iterator: AsyncIterator[bytes], context: Any) -> pb.PushResult:
        answer = await self._accept(GrpcFrameStream(context))
        return pb.PushResult(committed=answer.committed, error=answer.error, retryable=answer.retryable)


class GrpcFrameStream:
    def __init__(self, context: Any) -> None:
        self._context = context

    async def read(self) -> Frame | None:
        message = await self._context.read()
        if message is grpc.aio.EOF:
            return None
        try:
            return frame_from_bytes(message)
        except BadRequest as error:
            raise PushFailed(error.message, retryable=False) from error


def _raise_if_cancelled() -> None:
    """grpc.aio raises CancelledError for a cancelled call too; only a cancelled task must go on with it."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _reason(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name.lower()}: {error.details()}"
