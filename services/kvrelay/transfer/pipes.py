"""What carries the frames of a Push. The halves know these protocols only; gRPC is in `grpc_pipe`.

    sender    Pipe.connect ─▶ PushCall: send, send, ...; answer (awaited from the start); cancel
    receiver  accept(FrameStream) ─▶ PushAnswer

`LoopbackPipe` joins two ends in one event loop: the same code, no socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from kvrelay.core.handoff import Receiver
from kvrelay.rpc.frames import Frame
from kvrelay.transfer.words import PipeBroken, PushAnswer

LOOPBACK_FRAMES = 2
"""Frames under way in a loopback Push: the sender waits for the receiver as it does on a network."""


class FrameStream(Protocol):
    async def read(self) -> Frame | None:
        """The next frame; None once the sender has closed its side. Raises PushFailed for bytes that are no frame."""
        ...


class PushCall(Protocol):
    async def send(self, frame: Frame) -> None:
        """Returns when the frame has left. Raises PipeBroken if the call is over; `answer` may know why."""
        ...

    async def answer(self) -> PushAnswer:
        """The receiver's last word. Raises PipeBroken if there is none."""
        ...

    def cancel(self) -> None:
        """End the call now, in whatever state it is."""
        ...


class Pipe(Protocol):
    def connect(self, receiver: Receiver) -> PushCall:
        """Begin a Push to this receiver. Connects lazily: errors come from the call."""
        ...

    async def close(self) -> None: ...


Accept = Callable[[FrameStream], Awaitable[PushAnswer]]


class LoopbackPipe:
    """Receivers listen under an address of their own choice."""

    def __init__(self) -> None:
        self._doors: dict[str, Accept] = {}

    def listen(self, address: str, accept: Accept) -> None:
        self._doors[address] = accept

    def leave(self, address: str) -> None:
        self._doors.pop(address, None)

    def connect(self, receiver: Receiver) -> PushCall:
        return LoopbackCall(self._doors.get(receiver.address, _nobody))

    async def close(self) -> None:
        self._doors.clear()


async def _nobody(stream: FrameStream) -> PushAnswer:
    raise PipeBroken("connection refused")


class LoopbackCall:
    """One Push between two coroutines; also the receiver's `FrameStream`."""

    def __init__(self, accept: Accept) -> None:
        self._frames: asyncio.Queue[Frame] = asyncio.Queue(LOOPBACK_FRAMES)
        self._serving = asyncio.ensure_future(accept(self))

    async def read(self) -> Frame | None:
        return await self._frames.get()

    async def send(self, frame: Frame) -> None:
        if self._serving.done():
            raise PipeBroken("the receiver has ended the call")
        putting = asyncio.ensure_future(self._frames.put(frame))
        try:
            await asyncio.wait({putting, self._serving}, return_when=asyncio.FIRST_COMPLETED)
            if not putting.done():
                raise PipeBroken("the receiver has ended the call")
        finally:
            putting.cancel()

    async def answer(self) -> PushAnswer:
        await asyncio.wait({self._serving})
        if self._serving.cancelled():
            raise PipeBroken("the call was cancelled")
        return self._serving.result()

    def cancel(self) -> None:
        self._serving.cancel()
