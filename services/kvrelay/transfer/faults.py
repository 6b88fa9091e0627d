"""A pipe that does what fault rules say, to frames that leave (`pipe.send`) and frames that arrive (`pipe.receive`)."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace

from kvrelay.core.faults import Action, Faults, Seam, never
from kvrelay.core.handoff import Commit, PushOpen, Receiver, Slab
from kvrelay.core.ids import WorkerId
from kvrelay.rpc.frames import Frame, Heartbeat
from kvrelay.transfer.pipes import Accept, FrameStream, Pipe, PushCall
from kvrelay.transfer.words import PipeBroken, PushAnswer, PushFailed

CUT = "cut by a fault rule"
_NAMES = {PushOpen: "open", Slab: "slab", Heartbeat: "heartbeat", Commit: "commit"}


def damaged(frame: Frame) -> Frame | None:
    """The frame with other bytes; None where nobody would miss it."""
    match frame:
        case Slab():
            payload = bytes(frame.payload)
            return replace(frame, payload=bytes([payload[0] ^ 1]) + payload[1:])
        case Commit():
            return replace(frame, num_slabs=frame.num_slabs + 1)
        case PushOpen():
            return replace(frame, checksum=f"not {frame.checksum}")
        case Heartbeat():
            return None


class FaultyPipe:
    def __init__(self, pipe: Pipe, faults: Faults) -> None:
        self._pipe = pipe
        self._faults = faults

    def connect(self, receiver: Receiver) -> PushCall:
        return FaultyCall(self._pipe.connect(receiver), self._faults, receiver.worker_id)

    async def close(self) -> None:
        await self._pipe.close()


class FaultyCall:
    """The sender's end of one Push. `worker` in a rule is the receiver."""

    def __init__(self, call: PushCall, faults: Faults, worker_id: WorkerId) -> None:
        self._call = call
        self._faults = faults
        self._worker_id = worker_id
        self._transfer = ""
        self._goes_nowhere = False

    async def send(self, frame: Frame) -> None:
        if isinstance(frame, PushOpen):
            self._transfer = frame.transfer_id
        if self._goes_nowhere:
            return
        facts = {"frame": _NAMES[type(frame)], "transfer": self._transfer, "worker": self._worker_id}
        rule = self._faults.meet(Seam.PIPE_SEND, facts)
        if rule is None:
            await self._call.send(frame)
            return
        match rule.do:
            case Action.DELAY:
                await asyncio.sleep(rule.seconds)
                await self._call.send(frame)
            case Action.CORRUPT:
                if (other := damaged(frame)) is not None:
                    await self._call.send(other)
            case Action.DUPLICATE:
                await self._call.send(frame)
                await self._call.send(frame)
            case Action.TRUNCATE if isinstance(frame, Slab):
                await self._call.send(replace(frame, payload=bytes(frame.payload)[: len(frame.payload) // 2]))
            case Action.STALL:
                await never()
            case Action.HALF_OPEN:
                self._goes_nowhere = True
            case Action.CUT | Action.TRUNCATE:
                self._call.cancel()
                raise PipeBroken(CUT)
            case Action.KILL:
                self._faults.kill()
            case Action.DROP:
                pass

    async def answer(self) -> PushAnswer:
        return await self._call.answer()

    def cancel(self) -> None:
        self._call.cancel()


class FaultyFrames:
    """The receiver's end of one Push. `worker` in a rule is the sender."""

    def __init__(self, stream: FrameStream, faults: Faults) -> None:
        self._stream = stream
        self._faults = faults
        self._again: deque[Frame] = deque()
        self._opening: PushOpen | None = None

    async def read(self) -> Frame | None:
        while True:
            if self._again:
                return self._again.popleft()
            frame = await self._stream.read()
            if frame is None:
                return None
            if isinstance(frame, PushOpen):
                self._opening = frame
            met = await self._met(frame)
            if met is not None:
                return met

    async def _met(self, frame: Frame) -> Frame | None:
        """What becomes of a frame; None: nobody gets it."""
        rule = self._faults.meet(Seam.PIPE_RECEIVE, self._facts(frame))
        match rule.do if rule is not None else None:
            case Action.DELAY if rule is not None:
                await asyncio.sleep(rule.seconds)
            case Action.CORRUPT:
                return damaged(frame)
            case Action.DUPLICATE:
                self._again.append(frame)
            case Action.TRUNCATE if isinstance(frame, Slab):
                return replace(frame, payload=bytes(frame.payload)[: len(frame.payload) // 2])
            case Action.STALL | Action.HALF_OPEN:
                await never()
            case Action.CUT | Action.TRUNCATE:
                raise PushFailed(CUT)
            case Action.KILL:
                self._faults.kill()
                return None
            case Action.DROP:
                return None
        return frame

    def _facts(self, frame: Frame) -> dict[str, str | frozenset[str]]:
        facts: dict[str, str | frozenset[str]] = {"frame": _NAMES[type(frame)]}
        if self._opening is not None:
            facts |= {"transfer": self._opening.transfer_id, "worker": self._opening.sender}
        return facts


def faulty_accept(accept: Accept, faults: Faults | None) -> Accept:
    """The same receiver, behind the rules if there are any."""
    return accept if faults is None else lambda stream: accept(FaultyFrames(stream, faults))
