"""Where everything that concerns one request meets: its only reader is the coordinator task of that request."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from kvrelay.core.errors import Broken

T = TypeVar("T")


class Mailbox(Generic[T]):
    """`put` never blocks and never raises: the link's reader must go on for everybody else."""

    def __init__(self, max_signals: int) -> None:
        self._max_signals = max_signals
        self._signals: deque[T] = deque()
        self._overflown = False
        self._wake = asyncio.Event()

    def put(self, signal: T) -> None:
        if len(self._signals) >= self._max_signals:
            self._overflown = True
        else:
            self._signals.append(signal)
        self._wake.set()

    async def get(self) -> T:
        """Raises Broken when signals were dropped: the request can no longer be told from another."""
        while not self._signals and not self._overflown:
            self._wake.clear()
            await self._wake.wait()
        if self._overflown:
            raise Broken(f"this router fell {self._max_signals} events behind on one request")
        return self._signals.popleft()
