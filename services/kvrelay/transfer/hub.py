"""The transfer side of a worker process: its own thread, its own event loop, its own gRPC server.

    engine thread ──call_soon_threadsafe──▶ transfer loop (TransferDesk, server, channels) ──▶ EngineInbox

So that arriving KV does not disturb the token streams of the Attach loop, and neither disturbs the engine. grpc.aio
serves several loops of one process: each call belongs to the loop that made it (tested with both loops under load).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from kvrelay.core.config import TransferSettings
from kvrelay.core.faults import Faults
from kvrelay.core.handles import HandleSeal
from kvrelay.core.handoff import Commit, KvBytes, KvIdentity
from kvrelay.core.ids import Incarnation, TransferId, WorkerId
from kvrelay.core.ports import EngineInbox, Expected, Outgoing
from kvrelay.rpc.server import bind, new_server
from kvrelay.rpc.tls import Tls
from kvrelay.transfer.desk import STOPPING, TransferDesk
from kvrelay.transfer.faults import FaultyPipe, faulty_accept
from kvrelay.transfer.grpc_pipe import MAX_FRAME_BYTES, GrpcPipe, GrpcPushService
from kvrelay.transfer.memory import keep_freed_slabs
from kvrelay.transfer.words import Home, TransferWatch, Unwatched

START_TIMEOUT_S = 10.0
SPARE_CALLS = 64
"""Calls beyond `max_open` that the server takes on, so that strangers get a reason and not a full house."""


@dataclass(frozen=True, slots=True)
class _Running:
    """What exists only while the loop turns. Touched on the loop, but for `call_soon_threadsafe`."""

    loop: asyncio.AbstractEventLoop
    desk: TransferDesk
    stopping: asyncio.Event


class TransferHub:
    """A `TransferPort` whose methods post to the transfer loop and return at once.

    After `stop`, what is still expected or sent ends right away.
    """

    def __init__(
        self,
        settings: TransferSettings,
        identity: KvIdentity,
        kv: KvBytes,
        worker_id: WorkerId,
        incarnation: Incarnation,
        watch: TransferWatch | None = None,
        tls: Tls | None = None,
        seal: HandleSeal | None = None,
        faults: Faults | None = None,
    ) -> None:
        self._settings = settings
        self._tls = tls
        self._faults = faults
        self._home = Home(worker_id, incarnation, identity, kv, watch or Unwatched(), seal)
        self._inbox: EngineInbox | None = None
        self._thread: threading.Thread | None = None
        self._running: _Running | None = None
        self._posting = threading.Lock()
        """Held for a post, so that none slips in behind the loop's last turn."""
        self._started = threading.Event()
        self._address = ""
        self._failure: OSError | None = None

    def bind(self, inbox: EngineInbox) -> None:
        """Before `start`: where landings and endings are reported."""
        self._inbox = inbox

    def start(self, host: str, port: int) -> str:
        """Serve on host:port (0: a free one); returns host:port. Raises OSError if it cannot listen there."""
        if self._inbox is None:
            raise RuntimeError("bind an inbox before start")
        keep_freed_slabs()
        self._thread = threading.Thread(
            target=self._run_thread, args=(host, port, self._inbox), name="kv-transfer", daemon=True
        )
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise OSError(f"the transfer server did not start within {START_TIMEOUT_S:g} s")
        if self._failure is not None:
            raise self._failure
        return self._address

    def stop(self, timeout_s: float) -> bool:
        """End every transfer and the thread. False if the thread did not end in time."""
        if self._thread is None:
            return True
        self._post(lambda running: running.stopping.set())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- TransferPort: any thread ---------------------------------------------------------------------------------

    def expect(self, expected: Expected) -> None:
        if not self._post(lambda running: running.desk.expect(expected)) and self._inbox is not None:
            self._inbox.push_ended(expected.transfer_id, STOPPING)

    def close(self, transfer_id: TransferId) -> None:
        self._post(lambda running: running.desk.close(transfer_id))

    def send(self, outgoing: Outgoing) -> None:
        if not self._post(lambda running: running.desk.send(outgoing)) and self._inbox is not None:
            self._inbox.send_ended(outgoing.handoff.transfer_id, STOPPING)

    def progress(self, transfer_id: TransferId, num_computed: int) -> None:
        self._post(lambda running: running.desk.progress(transfer_id, num_computed))

    def finish(self, transfer_id: TransferId, commit: Commit) -> None:
        self._post(lambda running: running.desk.finish(transfer_id, commit))

    def abort_send(self, transfer_id: TransferId) -> None:
        self._post(lambda running: running.desk.abort_send(transfer_id))

    def _post(self, call: Callable[[_Running], None]) -> bool:
        """False if the loop is not there, or not any more."""
        with self._posting:
            running = self._running
            if running is None:
                return False
            running.loop.call_soon_threadsafe(call, running)
            return True

    # --- the transfer thread --------------------------------------------------------------------------------------

    def _run_thread(self, host: str, port: int, inbox: EngineInbox) -> None:
        try:
            asyncio.run(self._serve(host, port, inbox))
        except OSError as error:
            self._failure = error
        finally:
            self._started.set()

    async def _serve(self, host: str, port: int, inbox: EngineInbox) -> None:
        pipe = GrpcPipe(self._tls) if self._faults is None else FaultyPipe(GrpcPipe(self._tls), self._faults)
        desk = TransferDesk(self._settings, self._home, inbox, pipe)
        server = self._new_server(desk)
        self._address = f"{host}:{bind(server, host, port, self._tls)}"
        await server.start()
        running = _Running(asyncio.get_running_loop(), desk, asyncio.Event())
        self._running = running
        self._started.set()
        try:
            await running.stopping.wait()
        finally:
            await desk.stop()
            await server.stop(None)
            with self._posting:
                self._running = None
            await asyncio.sleep(0)  # what was posted before that has its turn now

    def _new_server(self, desk: TransferDesk) -> grpc.aio.Server:
        server = new_server(
            max_message_bytes=MAX_FRAME_BYTES, max_concurrent_calls=self._settings.max_open + SPARE_CALLS
        )
        GrpcPushService(faulty_accept(desk.receive, self._faults)).add_to(server)
        return server
