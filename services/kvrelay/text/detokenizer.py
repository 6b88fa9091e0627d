"""Token bytes to text, one token at a time: what is streamed equals the whole decoded at once, however it is cut."""

from __future__ import annotations

import codecs

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Holds at most the bytes of one unfinished character. Bytes that are not UTF-8 become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = _new_decoder("replace")
        self.num_chars = 0
        """Characters given out so far."""
        self.has_partial = False
        """Bytes of an unfinished character are held; it will be character number `num_chars`."""

    def push(self, data: bytes) -> tuple[str, int]:
        """The characters that `data` completes, and the number of the character in which its first byte lies."""
        if not data:
            return "", self.num_chars
        may_continue = self.has_partial
        if not may_continue:
            start = self.num_chars
            if data.isascii():
                self.num_chars += len(data)
                return data.decode("ascii"), start
            return self._decode(data), start
        head = self._decode(data[:1])
        start = self.num_chars if self.has_partial or not head else self.num_chars - 1
        return head + (self._decode(data[1:]) if len(data) > 1 else ""), start

    def finish(self) -> str:
        """One U+FFFD if the end cut a character, else nothing."""
        text = self._decoder.decode(b"", final=True)
        self.num_chars += len(text)
        self.has_partial = False
        return text

    def _decode(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        held = self._decoder.getstate()[0]
        if len(held) == 2 and held[0] == 0xED and held[1] >= 0xA0:
            # A surrogate, already lost. Python's decoder would hold it, as two characters, until the next byte.
            text += self._decoder.decode(b"", final=True)
            held = b""
        self.num_chars += len(text)
        self.has_partial = bool(held)
        return text
