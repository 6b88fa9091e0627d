"""Who waits for admission, in which order: replays before new work, then higher priority, then first come."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from kvrelay.engine.sequence import Sequence

_Entry = tuple[bool, int, int, Sequence]


class WaitingQueue:
    """Its bound is kept by whoever adds; replays may exceed it, because they were inside some bound before."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[3] for entry in self._entries)

    @property
    def head(self) -> Sequence | None:
        return self._entries[0][3] if self._entries else None

    def add(self, seq: Sequence) -> None:
        self._num_added += 1
        insort(self._entries, (not seq.start.replay, -seq.start.priority, self._num_added, seq))

    def remove(self, seq: Sequence) -> None:
        del self._entries[next(i for i, entry in enumerate(self._entries) if entry[3] is seq)]
