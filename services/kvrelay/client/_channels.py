"""Connections of one client. A server or proxy lets about a hundred streams share one; the next ones would wait unseen.

So a stream takes a place on the connection with the fewest, and a new connection is opened before one is crowded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

C = TypeVar("C")

MAX_STREAMS_PER_CHANNEL = 90
MAX_CHANNELS_PER_TARGET = 64
"""Beyond 5,760 streams to one target they share what there is."""


class _Slot(Generic[C]):
    def __init__(self, channel: C) -> None:
        self.channel = channel
        self.num_streams = 0


class ChannelPool(Generic[C]):
    """Opens channels and hands them back to be closed. Thread-safe."""

    def __init__(self, targets: Sequence[str], open_channel: Callable[[str], C]) -> None:
        self._targets = targets
        self._open = open_channel
        self._slots: dict[str, list[_Slot[C]]] = {target: [] for target in targets}
        self._lock = threading.Lock()
        self._is_closed = False

    @contextmanager
    def lease(self, attempt: int) -> Iterator[C]:
        """A channel for one call. Each further attempt goes to the next target."""
        slot = self._take(self._targets[attempt % len(self._targets)])
        try:
            yield slot.channel
        finally:
            with self._lock:
                slot.num_streams -= 1

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> list[C]:
        """No leases from now on; returns the channels, which the caller closes."""
        with self._lock:
            self._is_closed = True
            channels = [slot.channel for slots in self._slots.values() for slot in slots]
            for slots in self._slots.values():
                slots.clear()
            return channels

    def _take(self, target: str) -> _Slot[C]:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the client is closed")
            slots = self._slots[target]
            slot = min(slots, key=lambda candidate: candidate.num_streams, default=None)
            if slot is None or (slot.num_streams >= MAX_STREAMS_PER_CHANNEL and len(slots) < MAX_CHANNELS_PER_TARGET):
                slot = _Slot(self._open(target))
                slots.append(slot)
            slot.num_streams += 1
            return slot
