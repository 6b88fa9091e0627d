"""From the coordinator to one front-door handler: a bounded queue of outputs, ended by success or by an error.

    put*, end ─▶ queue ─▶ take: all that is there ─▶ … ─▶ None, or the error that ended it
                   └ rings a bell, which several deliveries with one reader may share

The coordinator never waits for a client. A reader that falls more than the bound behind loses its own request, and
nobody else's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from kvrelay.core.errors import KvrelayError, Unavailable
from kvrelay.core.output import Output
from kvrelay.router.bell import Bell


class SlowReader(Unavailable):
    """The client does not read what it asked for."""


class Delivery:
    """One writer (the coordinator), one reader: `take` whenever the bell rings, or `async for`."""

    def __init__(self, max_outputs: int, bell: Bell | None = None) -> None:
        self._max_outputs = max_outputs
        self._outputs: list[Output] = []
        self._ended = False
        self._error: KvrelayError | None = None
        self._bell = bell or Bell()

    def put(self, output: Output) -> None:
        """Raises SlowReader when the reader is too far behind."""
        if len(self._outputs) >= self._max_outputs:
            raise SlowReader(f"the client fell {self._max_outputs} outputs behind; its request was cancelled")
        self._outputs.append(output)
        self._bell.ring()

    def end(self, error: KvrelayError | None) -> None:
        """Nothing follows. The reader gets what is queued, then the error, if any. Only the first call counts."""
        if self._ended:
            return
        self._ended, self._error = True, error
        if isinstance(error, SlowReader):
            self._outputs.clear()
        self._bell.ring()

    def take(self) -> list[Output] | None:
        """What has come since the last call, which may be nothing; None at the end. Raises the error after the rest."""
        if self._outputs or not self._ended:
            taken, self._outputs = self._outputs, []
            return taken
        if self._error is not None:
            raise self._error
        return None

    async def __aiter__(self) -> AsyncGenerator[Output, None]:
        while (outputs := self.take()) is not None:
            for output in outputs:
                yield output
            if not outputs:
                await self._bell.wait()
