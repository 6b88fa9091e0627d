"""From the coordinator to one front-door handler: a bounded queue of outputs, ended by success or by an error.

The coordinator never waits for a client. A reader that falls more than the bound behind loses its own request, and
nobody else's.
"""

from __future__ import annotations

import asyncio
from collections import deque

from kvrelay.core.errors import KvrelayError, Unavailable
from kvrelay.core.output import Output


class SlowReader(Unavailable):
    """The client does not read what it asked for."""


class Delivery:
    """One writer (the coordinator), one reader (`async for`)."""

    def __init__(self, max_outputs: int) -> None:
        self._max_outputs = max_outputs
        self._outputs: deque[Output] = deque()
        self._ended = False
        self._error: KvrelayError | None = None
        self._wake = asyncio.Event()

    def put(self, output: Output) -> None:
        """Raises SlowReader when the reader is too far behind."""
        if len(self._outputs) >= self._max_outputs:
            raise SlowReader(f"the client fell {self._max_outputs} outputs behind; its request was cancelled")
        self._outputs.append(output)
        self._wake.set()

    def end(self, error: KvrelayError | None) -> None:
        """Nothing follows. The reader gets what is queued, then the error, if any. Only the first call counts."""
        if self._ended:
            return
        self._ended, self._error = True, error
        if isinstance(error, SlowReader):
            self._outputs.clear()
        self._wake.set()

    def __aiter__(self) -> Delivery:
        return self

    async def __anext__(self) -> Output:
        while not self._outputs:
            if self._ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._outputs.popleft()
