"""One Attach stream after its Hello.

    attached ──▶ ended by: the router (end of stream) · silence · a full outbox · the same router coming again
        └─ finish() ─▶ what is queued is written, then ended

Beats go out on a timer of their own, and the same timer counts how long the router has said nothing. Silence is
counted in ticks, not in clock time: a loop that was itself held up for seconds does not blame the router.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvrelay.core.config import LinkSettings
from kvrelay.core.events import TERMINAL, Committed, Event, Reserved
from kvrelay.core.handoff import Receiver
from kvrelay.core.ids import RouterId, SeqKey
from kvrelay.core.placement import Load
from kvrelay.pb import worker_pb2 as pb
from kvrelay.rpc.attach import StreamBroken, WorkerEnd
from kvrelay.rpc.events import step_to_pb
from kvrelay.rpc.records import load_to_pb
from kvrelay.worker.outbox import Batch, LinkOutbox


class Link:
    """`run` is the life; `end` may be called at any time, by anyone on the loop."""

    def __init__(self, router_id: RouterId, settings: LinkSettings, receivers: tuple[Receiver, ...]) -> None:
        """`receivers`: where this worker's shards can be pushed; each reservation gets them with its own handle."""
        self.router_id = router_id
        self.outbox = LinkOutbox(settings.max_outbox_bytes)
        self.done = asyncio.Event()
        """Set once the stream's handler is over."""
        self._settings = settings
        self._receivers = receivers
        self._handles: dict[SeqKey, bytes] = {}
        """Of every choice of a reservation that has not been committed yet."""
        self._num_silent_beats = 0
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def num_reservations(self) -> int:
        """Asked for, and neither committed nor over."""
        return len({(key.request_id, key.attempt) for key in self._handles})

    def reserve(self, keys: Sequence[SeqKey], handle: bytes) -> None:
        self._handles.update(dict.fromkeys(keys, handle))

    def settle(self, events: Sequence[Event]) -> None:
        """What is committed or over is no reservation any more."""
        for event in events:
            if isinstance(event, (Committed, *TERMINAL)):
                self._handles.pop(event.key, None)

    def end(self, reason: str) -> None:
        """At once, whatever is still queued."""
        if not self._end.done():
            self._end.set_result(reason)

    def finish(self) -> None:
        """Write what is queued, then end."""
        self.outbox.close()

    async def run(
        self, end: WorkerEnd, dispatch: Callable[[pb.RouterMessage], None], load: Callable[[], Load]
    ) -> str:
        """Until the stream ends. Returns why; empty when the router ended it in good order."""
        tasks: list[asyncio.Future[str]] = [
            asyncio.create_task(self._read(end, dispatch)),
            asyncio.create_task(self._write(end)),
            asyncio.create_task(self._tick(load)),
        ]
        try:
            done, _ = await asyncio.wait([*tasks, self._end], return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _read(self, end: WorkerEnd, dispatch: Callable[[pb.RouterMessage], None]) -> str:
        while True:
            try:
                message = await end.read()
            except StreamBroken as broken:
                return str(broken)
            if message is None:
                return ""
            self._num_silent_beats = 0
            dispatch(message)

    async def _write(self, end: WorkerEnd) -> str:
        while (batch := await self.outbox.get()) is not None:
            try:
                await end.write(self._message(batch))
            except StreamBroken as broken:
                return str(broken)
        return "this worker is going down"

    async def _tick(self, load: Callable[[], Load]) -> str:
        max_silent_beats = math.ceil(self._settings.silence_s / self._settings.beat_s)
        while self._num_silent_beats <= max_silent_beats:
            await asyncio.sleep(self._settings.beat_s)
            self._num_silent_beats += 1
            self.outbox.beat(load())
        return f"the router said nothing for {self._settings.silence_s:g} s"

    def _message(self, batch: Batch) -> pb.WorkerMessage:
        if batch.events:
            return step_to_pb(batch.events, batch.load, self._receivers_for)
        return pb.WorkerMessage(beat=load_to_pb(batch.load))

    def _receivers_for(self, event: Event) -> tuple[Receiver, ...]:
        if not isinstance(event, Reserved):
            return ()
        handle = self._handles.get(event.key, b"")
        return tuple(replace(receiver, handle=handle) for receiver in self._receivers)
