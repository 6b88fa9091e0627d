"""Stop strings in a growing text: nothing that may become part of a match leaves before it is decided.

    text      a b c d e f            stops "cdX", "de"
    decided   └─┘                    after "d": c d may become "cdX", held
    match           └─┘              after "e": "cdX" is out, "de" matched; "c" is released, "de" never leaves

The match that starts first wins, in the whole text and not only in what one step brought: a complete match waits
while one that began before it is still possible. Of two that start together the shorter one completes first and wins.
So the result is the same for every way of cutting the text.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Prefix:
    """Knuth-Morris-Pratt: how much of `stop` the text read so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._fallback = [0] * len(stop)
        for i in range(1, len(stop)):
            self._fallback[i] = self._advance(self._fallback[i - 1], stop[i])

    def _advance(self, length: int, character: str) -> int:
        if length == len(self.stop):
            length = self._fallback[length - 1]
        while length and self.stop[length] != character:
            length = self._fallback[length - 1]
        return length + (self.stop[length] == character)

    def read(self, character: str) -> bool:
        self.length = self._advance(self.length, character)
        return self.length == len(self.stop)


class StopMatcher:
    """Fed with text; gives back the part that is safe to show. `matched` names the stop string once decided."""

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("an empty stop string matches everywhere")
        self._prefixes = [_Prefix(stop) for stop in stops]
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._held = ""
        self._num_read = 0
        self._best: tuple[int, str] | None = None
        self.matched: str | None = None

    def push(self, text: str) -> str:
        if self.matched is not None:
            return ""
        if not self._held and self._first_characters.isdisjoint(text):
            self._num_read += len(text)
            return text
        for i, character in enumerate(text):
            self._num_read += 1
            if self._read(character):
                return self._end(text[: i + 1])
        return self._release(text, self._open_start())

    def finish(self) -> str:
        """The text is over: what was held is safe, unless a match was waiting for an earlier one."""
        if self.matched is not None:
            return ""
        return self._end("") if self._best is not None else self._release("", self._num_read)

    def _read(self, character: str) -> bool:
        """True once the earliest match is certain."""
        for prefix in self._prefixes:
            if prefix.read(character):
                start = self._num_read - len(prefix.stop)
                if self._best is None or start < self._best[0]:
                    self._best = (start, prefix.stop)
        return self._best is not None and self._best[0] <= self._open_start()

    def _open_start(self) -> int:
        return self._num_read - max(prefix.length for prefix in self._prefixes)

    def _end(self, text: str) -> str:
        assert self._best is not None
        start, self.matched = self._best
        released = self._release(text, start)
        self._held = ""
        return released

    def _release(self, text: str, boundary: int) -> str:
        """`boundary` counts from the start of the whole text; all before it is safe."""
        if self._best is not None:
            boundary = min(boundary, self._best[0])
        buffer = self._held + text
        keep = self._num_read - boundary
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]
