"""What the engine says, on its way to the routers. Two bounded stops, neither of which the engine ever waits at.

    engine thread ─on_step─▶ StepOutbox ─one hop─▶ loop ─split by owner─▶ LinkOutbox ─one message per step─▶ stream

While a stream is not writable its LinkOutbox coalesces: tokens of one sequence join into one event, the newest load
wins. Over `max_outbox_bytes` the stream ends, and with it its work; a router replays elsewhere. When the loop itself
is too slow to take the steps, every stream has lost events and ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrelay.core.events import Event, Token, Tokens
from kvrelay.core.ids import SeqKey
from kvrelay.core.placement import Load

EVENT_BYTES = 96
"""Request id, numbers and framing of one event on the wire, rounded up."""
TOKEN_BYTES = 12
TOP_BYTES = 10


def token_bytes(tokens: Sequence[Token]) -> int:
    return sum(TOKEN_BYTES + TOP_BYTES * len(token.top) for token in tokens)


def event_bytes(event: Event) -> int:
    """An estimate of its size on the wire; never far below."""
    tokens = getattr(event, "tokens", ())
    return EVENT_BYTES + token_bytes(tokens)


class StepOutbox:
    """The engine's `EngineOutbox`: collects under a lock, wakes the loop at most once until it has been there."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, max_bytes: int, *, on_step: Callable[[Sequence[Event], Load], None],
        on_overflow: Callable[[], None], on_death: Callable[[BaseException], None],
    ) -> None:
        self._loop = loop
        self._max_bytes = max_bytes
        self._deliver, self._deliver_overflow, self._deliver_death = on_step, on_overflow, on_death
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._load = Load()
        self._num_bytes = 0
        self._is_scheduled = False

    def on_step(self, events: Sequence[Event], load: Load) -> None:
        with self._lock:
            self._load = load
            self._num_bytes += sum(map(event_bytes, events))
            if self._num_bytes > self._max_bytes:
                self._events.clear()
            else:
                self._events.extend(events)
            hop, self._is_scheduled = not self._is_scheduled, True
        if hop:
            self._call(self._flush)

    def on_death(self, error: BaseException) -> None:
        self._call(lambda: self._deliver_death(error))

    def _flush(self) -> None:
        with self._lock:
            events, self._events = self._events, []
            overflowed, self._num_bytes = self._num_bytes > self._max_bytes, 0
            load, self._is_scheduled = self._load, False
        if overflowed:
            self._deliver_overflow()
        self._deliver(events, load)

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self._loop.is_closed():
                raise


@dataclass(slots=True)
class _Run:
    """Consecutive tokens of one sequence that have not been written yet."""

    key: SeqKey
    first_index: int
    tokens: list[Token]

    def frozen(self) -> Tokens:
        return Tokens(self.key, self.first_index, tuple(self.tokens))


@dataclass(frozen=True, slots=True)
class Batch:
    """One message: the events since the last one, or none for a beat."""

    events: list[Event]
    load: Load


@dataclass(slots=True)
class LinkOutbox:
    """What one stream still has to write. Loop only; one reader (`get`)."""

    max_bytes: int
    num_bytes: int = 0
    _queue: list[Event | _Run] = field(default_factory=list)
    _runs: dict[SeqKey, _Run] = field(default_factory=dict)
    _load: Load = field(default_factory=Load)
    _is_beat_due: bool = False
    _is_closed: bool = False
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, events: Sequence[Event], load: Load) -> bool:
        """False: over the bound, the stream has to end."""
        for event in events:
            self._put(event)
        self._load = load
        self._wake.set()
        return self.num_bytes <= self.max_bytes

    def beat(self, load: Load) -> None:
        self._load, self._is_beat_due = load, True
        self._wake.set()

    def close(self) -> None:
        """`get` still hands out what is queued, then None."""
        self._is_closed = True
        self._wake.set()

    async def get(self) -> Batch | None:
        while not (self._queue or self._is_beat_due):
            if self._is_closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        events = [item.frozen() if isinstance(item, _Run) else item for item in self._queue]
        self._queue.clear()
        self._runs.clear()
        self.num_bytes, self._is_beat_due = 0, False
        return Batch(events, self._load)

    def _put(self, event: Event) -> None:
        if not isinstance(event, Tokens):
            self._queue.append(event)
            self.num_bytes += event_bytes(event)
            return
        run = self._runs.get(event.key)
        if run is not None and run.first_index + len(run.tokens) == event.first_index:
            run.tokens.extend(event.tokens)
            self.num_bytes += token_bytes(event.tokens)
            return
        self._runs[event.key] = run = _Run(event.key, event.first_index, list(event.tokens))
        self._queue.append(run)
        self.num_bytes += event_bytes(event)
