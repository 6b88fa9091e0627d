"""How long work (download, conversion, load) tells a human where it is.

`cli` draws bars; tests and workers say nothing.
"""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """One task at a time: `start`, any number of `advance`, `done`."""

    def start(self, name: str, total: int) -> None:
        """`total` is in units of the task's own (bytes, tensors); 0 if nobody knows."""
        ...

    def advance(self, n: int) -> None: ...

    def done(self) -> None: ...


class NullProgress:
    """Says nothing."""

    def start(self, name: str, total: int) -> None: ...

    def advance(self, n: int) -> None: ...

    def done(self) -> None: ...
