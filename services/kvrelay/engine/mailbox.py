"""How other threads reach the engine: they leave a message and go on; the engine reads all of them once per step.

Its length is bounded by what sends into it: one `Start`, one `cancel` and one `Migrate` per request a router keeps
under way, and three messages per open transfer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.core.handoff import Commit
from kvrelay.core.ids import SeqKey, TransferId
from kvrelay.core.request import Migrate, Start


@dataclass(frozen=True, slots=True)
class Submit:
    start: Start
    arrived_at: float


@dataclass(frozen=True, slots=True)
class Cancel:
    key: SeqKey


@dataclass(frozen=True, slots=True)
class Landed:
    transfer_id: TransferId
    commit: Commit
    reply: Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class PushEnded:
    transfer_id: TransferId
    error: str


@dataclass(frozen=True, slots=True)
class SendEnded:
    transfer_id: TransferId
    error: str


@dataclass(frozen=True, slots=True)
class SendLevel:
    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class Drain:
    pass


Message = Submit | Cancel | Migrate | Landed | PushEnded | SendLevel | SendEnded | Drain


class Mailbox:
    """Many writers, one reader; nobody ever blocks but the reader, and only when it asks to."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._arrived = threading.Event()
        self._lock = threading.Lock()
        self._is_closed = False

    def post(self, message: Message) -> None:
        """After `close` nobody reads any more: a landed transfer is told so, everything else is dropped."""
        with self._lock:
            if not self._is_closed:
                self._messages.append(message)
                self._arrived.set()
                return
        if isinstance(message, Landed):
            message.reply(False)

    def take(self) -> list[Message]:
        """Everything that has arrived, in order."""
        with self._lock:
            messages = list(self._messages)
            self._messages.clear()
            self._arrived.clear()
        return messages

    def wait(self, timeout_s: float) -> None:
        """Until something has arrived, or the time is over."""
        self._arrived.wait(timeout_s)

    def wake(self) -> None:
        self._arrived.set()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        for message in self.take():
            if isinstance(message, Landed):
                message.reply(False)
