"""One Push call as the sender holds it: every wait has an end, and an early answer is noticed at once."""

from __future__ import annotations

import asyncio
from types import TracebackType

from kvrelay.core.config import TransferSettings
from kvrelay.core.handoff import Commit, Receiver
from kvrelay.rpc.frames import Frame, Heartbeat
from kvrelay.transfer.pipes import Pipe
from kvrelay.transfer.reception import LANDED_TIMEOUT_S
from kvrelay.transfer.words import PipeBroken, PushAnswer, PushFailed

ANSWER_TIMEOUT_S = LANDED_TIMEOUT_S + 5.0
"""After the commit: longer than the receiver itself waits for its engine, so that its reason arrives."""
REASON_TIMEOUT_S = 1.0
"""After a broken write: the call is over, its status is at hand."""


class PushLeg:
    """Use as a context: leaving it ends the call, whatever its state. Every method raises PushFailed."""

    def __init__(self, pipe: Pipe, receiver: Receiver, settings: TransferSettings) -> None:
        self.receiver = receiver
        self.wake = asyncio.Event()
        """Set by the owner when there is more to send."""
        self._settings = settings
        self._call = pipe.connect(receiver)
        self._answer = asyncio.ensure_future(self._call.answer())
        self._answer.add_done_callback(lambda _: self.wake.set())

    async def __aenter__(self) -> PushLeg:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.cancel()
        self._answer.cancel()
        await asyncio.wait({self._answer})
        if not self._answer.cancelled():
            self._answer.exception()  # seen: whoever needed it has raised it

    def check(self) -> None:
        """Raises if the receiver has answered before the commit."""
        if self._answer.done():
            answer = self._outcome()
            raise PushFailed(answer.error or "the receiver answered before the commit", retryable=answer.retryable)

    async def write(self, frame: Frame) -> None:
        self.check()
        stall_s = self._settings.stall_s
        try:
            async with asyncio.timeout(stall_s):
                await self._call.send(frame)
        except TimeoutError:
            raise PushFailed(f"{self.receiver.worker_id} took no data for {stall_s:g} s") from None
        except PipeBroken as broken:
            await asyncio.wait({self._answer}, timeout=REASON_TIMEOUT_S)
            self.check()
            raise PushFailed(f"lost {self.receiver.worker_id}: {broken}") from broken

    async def wait_or_beat(self) -> None:
        """Until there is more to send or the receiver has answered; a heartbeat if that takes long."""
        try:
            async with asyncio.timeout(self._settings.heartbeat_s):
                await self.wake.wait()
            self.wake.clear()
        except TimeoutError:
            await self.write(Heartbeat())

    async def commit(self, commit: Commit) -> None:
        """Returns when the receiver's engine runs the sequence."""
        await self.write(commit)
        await asyncio.wait({self._answer}, timeout=ANSWER_TIMEOUT_S)
        if not self._answer.done():
            raise PushFailed(f"{self.receiver.worker_id} did not answer the commit within {ANSWER_TIMEOUT_S:g} s")
        answer = self._outcome()
        if not answer.committed:
            raise PushFailed(answer.error, retryable=answer.retryable)

    def _outcome(self) -> PushAnswer:
        try:
            return self._answer.result()
        except PipeBroken as broken:
            raise PushFailed(f"lost {self.receiver.worker_id}: {broken}") from broken
