"""Wakes the one reader of a queue: an `asyncio.Event` without the list of waiters and without the flag.

    reader:  while nothing is there: await bell.wait()          writer:  put something there, then bell.ring()

Nothing is lost between the reader's look and its wait, because nothing else runs between them.
"""

from __future__ import annotations

import asyncio


class Bell:
    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Unheard when nobody waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """One caller at a time."""
        assert self._waiter is None
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
