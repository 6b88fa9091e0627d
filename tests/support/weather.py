"""A pipe on a bad day: frames are lost, repeated, swapped, held back, or arrive with other bytes."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import replace

from kvrelay.core.handoff import Receiver, Slab
from kvrelay.rpc.frames import Frame
from kvrelay.transfer.pipes import Pipe, PushCall
from kvrelay.transfer.words import PushAnswer


class Weather:
    """What happens to frames on the way; clear until somebody says otherwise."""

    def __init__(self) -> None:
        self.chance = random.Random(0)
        self.loss = self.repeat = self.swap = self.delay = self.harm = 0.0

    def change(
        self, seed: int, *, loss: float = 0.0, repeat: float = 0.0, swap: float = 0.0, delay: float = 0.0,
        harm: float = 0.0,
    ) -> None:
        self.chance = random.Random(seed)
        self.loss, self.repeat, self.swap, self.delay, self.harm = loss, repeat, swap, delay, harm


class StormyCall:
    """One Push."""

    def __init__(self, call: PushCall, weather: Weather) -> None:
        self._call = call
        self._weather = weather
        self._held: deque[Frame] = deque()

    async def send(self, frame: Frame) -> None:
        weather, roll = self._weather, self._weather.chance.random
        if roll() < weather.delay:
            await asyncio.sleep(roll() * 8)
        if roll() < weather.loss:
            return
        if roll() < weather.harm and isinstance(frame, Slab):
            frame = replace(frame, payload=bytes([frame.payload[0] ^ 1]) + frame.payload[1:])
        if roll() < weather.swap:
            self._held.append(frame)
            return
        await self._call.send(frame)
        if roll() < weather.repeat:
            await self._call.send(frame)
        while self._held:
            await self._call.send(self._held.popleft())

    async def answer(self) -> PushAnswer:
        return await self._call.answer()

    def cancel(self) -> None:
        self._call.cancel()


class StormyPipe:
    def __init__(self, pipe: Pipe, weather: Weather) -> None:
        self._pipe = pipe
        self._weather = weather

    def connect(self, receiver: Receiver) -> PushCall:
        return StormyCall(self._pipe.connect(receiver), self._weather)

    async def close(self) -> None:
        await self._pipe.close()
