"""The two ends of an Attach stream, as router and worker hold them, whatever carries it.

    router   dial(address) ─▶ RouterEnd: write, read, close            worker   serve(WorkerEnd): write, read

gRPC is here; `faults.py` can stand in front of either end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from kvrelay.pb import worker_pb2 as pb
from kvrelay.pb import worker_pb2_grpc
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.tls import Tls

CANCELLED = "the worker cancelled the stream"


class StreamBroken(Exception):
    """The stream is over. The message says why, as far as this end knows."""


class RouterEnd(Protocol):
    async def write(self, message: pb.RouterMessage) -> None:
        """Returns when it has left. Raises StreamBroken."""
        ...

    async def read(self) -> pb.WorkerMessage:
        """Raises StreamBroken, also when the worker has ended the stream in good order."""
        ...

    async def close(self) -> None:
        """End the stream in whatever state it is."""
        ...


class WorkerEnd(Protocol):
    async def write(self, message: pb.WorkerMessage) -> None:
        """Raises StreamBroken."""
        ...

    async def read(self) -> pb.RouterMessage | None:
        """None once the router has ended the stream in good order. Raises StreamBroken."""
        ...


Dial = Callable[[str], RouterEnd]
"""Connects lazily: errors come from the stream."""


def dial_with(tls: Tls | None) -> Dial:
    """The way over gRPC; with `tls`, only to members of the cluster."""
    return lambda address: GrpcRouterEnd(address, tls)


class GrpcRouterEnd:
    """Owns the channel of one stream."""

    def __init__(self, address: str, tls: Tls | None) -> None:
        self._channel = open_channel(address, tls=tls)
        stub = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]
        self._call: Any = stub.Attach()

    async def write(self, message: pb.RouterMessage) -> None:
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise StreamBroken(await self._reason()) from None
        except asyncio.CancelledError:
            raise _broken_unless_cancelled() from None

    async def read(self) -> pb.WorkerMessage:
        try:
            message = await self._call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise StreamBroken(await self._reason()) from None
        except asyncio.CancelledError:
            raise _broken_unless_cancelled() from None
        if message is grpc.aio.EOF:
            raise StreamBroken(await self._reason())
        worker_message: pb.WorkerMessage = message
        return worker_message

    async def close(self) -> None:
        await self._channel.close(None)

    async def _reason(self) -> str:
        code, details = await self._call.code(), await self._call.details()
        return str(details or code.name.lower())


def _broken_unless_cancelled() -> BaseException:
    """gRPC raises CancelledError also when the other side has cancelled; only a cancelled task goes on with it."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        return asyncio.CancelledError()
    return StreamBroken(CANCELLED)


class GrpcWorkerEnd:
    def __init__(self, context: Any) -> None:
        self._context = context

    async def write(self, message: pb.WorkerMessage) -> None:
        try:
            await self._context.write(message)
        except grpc.aio.BaseError as error:
            raise StreamBroken(f"the stream broke: {error}") from error

    async def read(self) -> pb.RouterMessage | None:
        try:
            message = await self._context.read()
        except grpc.aio.BaseError as error:
            raise StreamBroken(f"the stream broke: {error}") from error
        return None if message is grpc.aio.EOF else message
