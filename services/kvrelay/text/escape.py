"""Control ids come from the chat template alone: user text that spells one stays ordinary text (TOK-04).

    messages ──mark──▶ template ──▶ rendered text ──▶ split at the literals ──▶ ids
             a Unicode noncharacter                    the template wrote;
             inside every control literal of           marks are taken out of
             the user, and at ends that could          the rest
             become one with their neighbour

A marked literal is no literal, so every literal that is left in the rendered text was written by the template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvrelay.core.errors import BadRequest

NONCHARACTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Code points that Unicode will never assign: a text has no use for them, but may still contain them."""


class ControlLiterals:
    """The texts of all added tokens of a tokenizer."""

    def __init__(self, literals: Iterable[str]) -> None:
        self._literals = sorted((literal for literal in literals if literal), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._literals)) or r"(?!)")
        self._prefixes = frozenset(literal[:i] for literal in self._literals for i in range(1, len(literal)))
        self._suffixes = frozenset(literal[i:] for literal in self._literals for i in range(1, len(literal)))
        self._longest = max(map(len, self._literals), default=0)

    def needs_marks(self, value: Any) -> bool:
        return any(self._is_dangerous(text) for text in _strings(value))

    def mark(self, value: Any, mark: str) -> Any:
        """A copy of messages or tools in which no string can give rise to a literal. Roles are left alone."""
        if isinstance(value, str):
            return self._mark_text(value, mark) if self._is_dangerous(value) else value
        if isinstance(value, dict):
            return {
                self._mark_key(key, mark): item if key == "role" else self.mark(item, mark)
                for key, item in value.items()
            }
        return [self.mark(item, mark) for item in value] if isinstance(value, list) else value

    def split(self, rendered: str) -> Iterator[tuple[str, str]]:
        """(ordinary text, literal after it) over the whole text; the last literal is empty. The longest wins."""
        position = 0
        for match in self._pattern.finditer(rendered):
            yield rendered[position : match.start()], match.group()
            position = match.end()
        yield rendered[position:], ""

    def _mark_key(self, key: Any, mark: str) -> Any:
        """Templates look fields up by name, and a name is an identifier."""
        return key if not isinstance(key, str) or key.isidentifier() else self.mark(key, mark)

    def _mark_text(self, text: str, mark: str) -> str:
        inside = self._pattern.sub(lambda match: match.group()[0] + mark + match.group()[1:], text)
        return f"{mark}{inside}{mark}" if self._has_open_end(text) else inside

    def _is_dangerous(self, text: str) -> bool:
        return self._pattern.search(text) is not None or self._has_open_end(text)

    def _has_open_end(self, text: str) -> bool:
        """Could this text make a literal together with what the template puts beside it?"""
        reach = range(1, min(self._longest, len(text) + 1))
        if any(text[-i:] in self._prefixes or text[:i] in self._suffixes for i in reach):
            return True
        return 0 < len(text) < self._longest and any(text in literal for literal in self._literals)


def free_noncharacter(values: Sequence[Any]) -> str:
    """One that none of the strings contains."""
    used = set[str]()
    for value in values:
        for text in _strings(value):
            used.update(text)
    for candidate in NONCHARACTERS:
        if candidate not in used:
            return candidate
    raise BadRequest("the messages use every Unicode noncharacter from U+FDD0 to U+FDEF", param="messages")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key != "role":
                yield from _strings(item)
            if isinstance(key, str) and not key.isidentifier():
                yield key
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
