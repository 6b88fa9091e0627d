"""The one memory of a choice's output, by index. What a replay starts from and what usage is counted from.

    unseen(first_index, tokens):   [known ......|next_index
                                    duplicates: must be equal, ignored
                                                |new: returned
                                                |   gap: an error
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.core.events import Token
from kvrelay.core.ids import TokenId


class ProtocolError(Exception):
    """A worker's tokens do not continue what is known. Its attempt is over; the choice is replayed."""


class TokenLog:
    """Append only. Starts with the tokens that a resuming caller brought along."""

    def __init__(self, resume: Sequence[TokenId] = ()) -> None:
        self._ids: list[TokenId] = list(resume)

    @property
    def next_index(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> tuple[TokenId, ...]:
        return tuple(self._ids)

    @property
    def last(self) -> TokenId | None:
        return self._ids[-1] if self._ids else None

    def unseen(self, first_index: int, tokens: Sequence[Token]) -> Sequence[Token]:
        """The part that continues the log. Raises ProtocolError on a gap or on another token at a known index."""
        if first_index > self.next_index:
            raise ProtocolError(f"token {first_index} came when {self.next_index} was next")
        known = min(self.next_index - first_index, len(tokens))
        for offset in range(known):
            mine, theirs = self._ids[first_index + offset], tokens[offset].token_id
            if mine != theirs:
                raise ProtocolError(f"token {first_index + offset} is {mine}, and now said to be {theirs}")
        return tokens[known:]

    def append(self, token: Token) -> None:
        self._ids.append(token.token_id)
