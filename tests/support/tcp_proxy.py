"""A TCP proxy between a client and a server that can delay answers, swallow them, and switch its target."""

from __future__ import annotations

import asyncio
from types import TracebackType


class TcpProxy:
    """`async with TcpProxy(port) as proxy: ...` listens on `proxy.port`."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        """For connections to come; those that exist stay where they are, as after a DNS switch."""
        self.delay_s = 0.0
        """Before each answer of the server goes on."""
        self.black_hole = False
        """Nothing passes, nothing is closed."""
        self.num_connections = 0
        self.max_connections = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.max_connections = max(self.max_connections, self.num_connections)
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
            try:
                _, pending = await asyncio.wait(
                    {
                        asyncio.ensure_future(self._pump(reader, up_writer, delayed=False)),
                        asyncio.ensure_future(self._pump(up_reader, writer, delayed=True)),
                    },
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in pending:
                    task.cancel()
            finally:
                up_writer.close()
        except OSError:
            pass
        finally:
            self.num_connections -= 1
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, delayed: bool) -> None:
        try:
            while data := await reader.read(65_536):
                if delayed and self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if not self.black_hole:
                    writer.write(data)
                    await writer.drain()
        except OSError:
            pass
