"""Redis behind a breaker: no method raises for its trouble, none takes longer than `call_timeout_s`.

    call ─▶ breaker open? ─▶ the fallback, counted
              └─ closed ─▶ a place among MAX_CALLS ─▶ Redis ─┬─▶ answer
                                                             ├─ READONLY, LOADING: drop connections, once more
                                                             └─ failure, timeout: the fallback, counted

Every call runs as a task of its own that is cancelled at most once, whether by the time limit or because its caller
left. One cancel makes the client drop the connection with the unread reply, so nobody gets another's answer (RED-01);
a second one could hit the clean-up and lose the connection's place in the pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from redis.exceptions import BusyLoadingError, MasterDownError, ReadOnlyError

from kvrelay.core.clock import Clock
from kvrelay.core.ids import BlockHash, TenantId, WorkerId
from kvrelay.core.placement import Load, SessionKey, SessionPlacement, WorkerRecord
from kvrelay.placement.breaker import Breaker, State
from kvrelay.placement.redis_registry import TROUBLE
from kvrelay.placement.registry import Quota, Registry, RegistryEvent

log = logging.getLogger(__name__)

MAX_CALLS = 16
"""Calls under way at once, one connection each; more wait their turn within their own time limit."""
CLOSE_S = 2.0
FAILED_OVER = (ReadOnlyError, BusyLoadingError, MasterDownError)
T = TypeVar("T")


class BreakerWatch(Protocol):
    """Told what happens, for the metrics. `observe.metrics` has two implementations."""

    def redis_breaker(self, is_open: bool) -> None: ...

    def redis_failed(self) -> None: ...

    def redis_dropped(self, kind: str) -> None: ...


class Store(Registry, Protocol):
    """A registry that raises for its trouble and can be told to begin with new connections."""

    @property
    def drop_connections(self) -> Callable[[], Awaitable[None]]: ...


class NoWatch:
    def redis_breaker(self, is_open: bool) -> None: ...

    def redis_failed(self) -> None: ...

    def redis_dropped(self, kind: str) -> None: ...


class GuardedRegistry:
    """Implements `Registry`; owns the store behind it. Lives in one event loop."""

    def __init__(
        self, inner: Store, clock: Clock, call_timeout_s: float, watch: BreakerWatch | None = None
    ) -> None:
        self._inner = inner
        self._watch = watch or NoWatch()
        self._timeout_s = call_timeout_s
        self._places = asyncio.Semaphore(MAX_CALLS)
        self._calls: set[asyncio.Task[Any]] = set()
        self._is_away = False
        self._last_trouble = ""
        self.breaker = Breaker(clock, self._breaker_changed)

    async def register(self, record: WorkerRecord, load: Load) -> None:
        await self._ask("write", lambda: self._inner.register(record, load), None)

    async def renew(self, record: WorkerRecord, load: Load) -> None:
        await self._ask("write", lambda: self._inner.renew(record, load), None)

    async def leave(self, record: WorkerRecord) -> None:
        await self._ask("write", lambda: self._inner.leave(record), None)

    async def workers(self) -> list[WorkerRecord]:
        nobody: list[WorkerRecord] = []
        return await self._ask("lookup", self._inner.workers, nobody)

    def events(self) -> AsyncIterator[RegistryEvent]:
        return self._inner.events()

    async def get_session(self, key: SessionKey) -> SessionPlacement | None:
        return await self._ask("lookup", lambda: self._inner.get_session(key), None)

    async def set_session(
        self, key: SessionKey, placement: SessionPlacement, expected_epoch: int
    ) -> SessionPlacement:
        """Without Redis everybody wins with what they offered."""
        return await self._ask(
            "write", lambda: self._inner.set_session(key, placement, expected_epoch), placement
        )

    async def prefix_holders(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        nobody: Mapping[WorkerId, int] = {}
        return await self._ask("lookup", lambda: self._inner.prefix_holders(hashes), nobody)

    async def add_prefix(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        await self._ask("write", lambda: self._inner.add_prefix(worker_id, hashes), None)

    async def take_quota(self, tenant: TenantId, amount: float, quota: Quota) -> float:
        """Without Redis nobody is refused: each router's own limits still hold."""
        return await self._ask("write", lambda: self._inner.take_quota(tenant, amount, quota), 0.0)

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls, timeout=CLOSE_S)
        await self._inner.close()

    async def _ask(self, kind: str, make: Callable[[], Coroutine[Any, Any, T]], fallback: T) -> T:
        if not self.breaker.allow():
            self._watch.redis_dropped(kind)
            return fallback
        call = asyncio.create_task(self._call(make))
        self._calls.add(call)
        call.add_done_callback(self._forget)
        try:
            await asyncio.wait({call}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            call.cancel()
            self.breaker.abandoned()
            raise
        if call.done() and not call.cancelled() and call.exception() is None:
            self.breaker.succeeded()
            return call.result()
        return self._give_up(kind, call, fallback)

    def _give_up(self, kind: str, call: asyncio.Task[T], fallback: T) -> T:
        call.cancel()
        error = None if not call.done() or call.cancelled() else call.exception()
        if error is not None and not isinstance(error, TROUBLE):
            self.breaker.failed()
            raise error
        self._last_trouble = str(error).rstrip(".") if error is not None else f"no answer within {self._timeout_s:g} s"
        self.breaker.failed()
        self._watch.redis_failed()
        self._watch.redis_dropped(kind)
        return fallback

    def _breaker_changed(self, state: State) -> None:
        self._watch.redis_breaker(state is not State.CLOSED)
        if state is State.HALF_OPEN or self._is_away == (state is State.OPEN):
            return
        self._is_away = state is State.OPEN
        if self._is_away:
            log.warning("Redis is away, and everything goes on without its hints: %s", self._last_trouble)
        else:
            log.info("Redis is back")

    async def _call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with self._places:
            try:
                return await make()
            except FAILED_OVER:
                await self._inner.drop_connections()
                return await make()

    def _forget(self, call: asyncio.Task[Any]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()
