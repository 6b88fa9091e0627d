"""Who asked for what: every open sequence of this worker and the Attach stream that carries it. Loop only.

    admit ─▶ open ─(terminal event)─▶ closed
               └─(end of its stream)─▶ forgotten: what the engine still says about it goes nowhere
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from enum import Enum
from typing import Generic, TypeVar

from kvrelay.core.ids import Attempt, Choice, RequestId, SeqKey
from kvrelay.core.request import Start

LinkT = TypeVar("LinkT", bound=Hashable)


class Admission(Enum):
    NEW = "new"
    DUPLICATE = "duplicate"
    """One of its sequences is open already: the Start came twice. Answering it would end the first one."""
    STALE = "stale"
    """A newer attempt of the same choice is open."""


class Ledger(Generic[LinkT]):
    def __init__(self) -> None:
        self._open: dict[RequestId, dict[SeqKey, LinkT]] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_open(self) -> int:
        return sum(len(keys) for keys in self._open.values())

    def admit(self, start: Start, link: LinkT) -> Admission:
        """Opens every choice of a NEW Start; leaves the others alone."""
        keys = tuple(start.key(choice) for choice in start.choices)
        known = self._open.get(start.request_id, {})
        if any(key in known for key in keys):
            return Admission.DUPLICATE
        newest = {(key.choice, key.attempt) for key in known}
        if any(choice in start.choices and attempt > start.attempt for choice, attempt in newest):
            return Admission.STALE
        self._open.setdefault(start.request_id, {}).update(dict.fromkeys(keys, link))
        self._empty.clear()
        return Admission.NEW

    def owner(self, key: SeqKey) -> LinkT | None:
        return self._open.get(key.request_id, {}).get(key)

    def choices(self, link: LinkT, request_id: RequestId, attempt: Attempt) -> list[Choice]:
        """Open choices of one Start, if this link owns it."""
        known = self._open.get(request_id, {})
        return [key.choice for key, owner in known.items() if key.attempt == attempt and owner is link]

    def close(self, key: SeqKey) -> None:
        known = self._open.get(key.request_id, {})
        known.pop(key, None)
        if not known:
            self._open.pop(key.request_id, None)
        if not self._open:
            self._empty.set()

    def keys_of(self, link: LinkT) -> list[SeqKey]:
        return [key for known in self._open.values() for key, owner in known.items() if owner is link]

    def forget(self, link: LinkT) -> list[SeqKey]:
        """Close all that a link owns. Returns the keys, for the engine to cancel."""
        keys = self.keys_of(link)
        for key in keys:
            self.close(key)
        return keys

    async def wait_empty(self) -> None:
        await self._empty.wait()
