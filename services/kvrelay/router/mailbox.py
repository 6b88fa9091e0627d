"""Where what concerns one request meets: its only reader is the coordinator task of that request.

    put ──▶ signals ─get─▶ the task          with errors: ... ──▶ an error inside ─get raises it─▶ the task
"""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Generic, TypeVar

from kvrelay.core.errors import Broken
from kvrelay.router.bell import Bell

T = TypeVar("T")


class Mailbox(Generic[T]):
    """`put` never blocks and never raises: the link's reader must go on for everybody else."""

    def __init__(self, max_signals: int) -> None:
        self._max_signals = max_signals
        self._signals: deque[T] = deque()
        self._failure: Exception | None = None
        self._bell = Bell()
        self.errors = ErrorsTo(self)
        """For work done on the task's behalf by somebody who must go on."""

    @property
    def is_empty(self) -> bool:
        """The reader is at rest: nothing is there that it has not dealt with."""
        return not self._signals and self._failure is None

    def put(self, signal: T) -> None:
        if len(self._signals) >= self._max_signals:
            self.fail(Broken(f"this router fell {self._max_signals} events behind on one request"))
        else:
            self._signals.append(signal)
            self._bell.ring()

    def fail(self, error: Exception) -> None:
        """Only the first counts."""
        self._failure = self._failure or error
        self._bell.ring()

    async def get(self) -> T:
        """Raises the failure, which goes before all signals. Broken: some were dropped, and the request can no longer
        be told from another."""
        while self.is_empty:
            await self._bell.wait()
        if self._failure is not None:
            raise self._failure
        return self._signals.popleft()


class ErrorsTo(Generic[T]):
    """`with`: an error inside is the mailbox reader's to raise, not the caller's."""

    def __init__(self, mailbox: Mailbox[T]) -> None:
        self._mailbox = mailbox

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._mailbox.fail(error)
        return True
