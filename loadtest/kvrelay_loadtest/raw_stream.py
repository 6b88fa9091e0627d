"""A streamed completion with as little client as possible: one socket, no JSON parsed, chunks counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from urllib.parse import urlsplit

MARK = b"data: {"
READ_BYTES = 1 << 16


class StreamBroken(Exception):
    """The answer was no stream of events, or ended early."""


class RawStream:
    """`await open()`, then `await run()`. One chunk carries one token of a stepped worker."""

    def __init__(self, url: str, body: dict[str, object], on_chunks: Callable[[int, float], None]) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)
        payload = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
        self._request = f"{head}content-length: {len(payload)}\r\nconnection: close\r\n\r\n".encode() + payload
        self._on_chunks = on_chunks
        """(chunks that came together, loop time)."""

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._address)

    async def run(self) -> None:
        """Sends the request and reads to the end. Raises StreamBroken."""
        loop = asyncio.get_running_loop()
        self._writer.write(self._request)
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head.split(b"\r\n", 1)[0]:
                raise StreamBroken(head.split(b"\r\n", 1)[0].decode(errors="replace"))
            tail = b""
            while data := await self._reader.read(READ_BYTES):
                found = (tail + data).count(MARK)
                if found:
                    self._on_chunks(found, loop.time())
                tail = (tail + data)[-len(MARK) + 1 :]
        except asyncio.IncompleteReadError as error:
            raise StreamBroken("the connection closed before the answer began") from error
        finally:
            self._writer.close()
