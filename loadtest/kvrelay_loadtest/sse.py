"""Server-sent events, as far as the OpenAI API uses them: bytes in, data of complete events out."""

from __future__ import annotations

DONE = "[DONE]"


class SseParser:
    """Feed it whatever the socket gives; lines may end in LF, CRLF or CR, and be cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._event = ""

    def feed(self, chunk: bytes) -> list[tuple[str, str]]:
        """(event name, data) of each event that `chunk` completes; the name is empty for plain data."""
        events: list[tuple[str, str]] = []
        buffer = self._rest + chunk
        held = b"\r" if buffer.endswith(b"\r") else b""  # may be the first half of CRLF
        lines = buffer[: len(buffer) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + held
        for line in lines:
            if line:
                self._field(line.decode())
            elif self._data:
                events.append((self._event, "\n".join(self._data)))
                self._data, self._event = [], ""
        return events

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
