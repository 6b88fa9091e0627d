"""A registry that does what fault rules say. It stands behind the breaker, which meets the trouble as Redis's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from kvrelay.core.faults import Action, Faults, Seam, never
from kvrelay.core.ids import BlockHash, TenantId, WorkerId
from kvrelay.core.placement import Load, SessionKey, SessionPlacement, WorkerRecord
from kvrelay.placement.registry import Quota, Registry, RegistryEvent

T = TypeVar("T")


class FaultyRegistry:
    """Implements `Registry`, but raises for trouble. Owns the one behind it."""

    def __init__(self, inner: Registry, faults: Faults, drop_connections: Callable[[], Awaitable[None]]) -> None:
        self._inner = inner
        self._faults = faults
        self.drop_connections = drop_connections

    async def register(self, record: WorkerRecord, load: Load) -> None:
        await self._call("register", lambda: self._inner.register(record, load))

    async def renew(self, record: WorkerRecord, load: Load) -> None:
        await self._call("renew", lambda: self._inner.renew(record, load))

    async def leave(self, record: WorkerRecord) -> None:
        await self._call("leave", lambda: self._inner.leave(record))

    async def workers(self) -> list[WorkerRecord]:
        return await self._call("workers", self._inner.workers)

    async def events(self) -> AsyncIterator[RegistryEvent]:
        """An event that meets a cut is lost, as in an outage of the subscription."""
        async for event in self._inner.events():
            rule = self._faults.meet(Seam.REGISTRY, {"call": "events"})
            if rule is None:
                yield event
                continue
            match rule.do:
                case Action.DELAY:
                    await asyncio.sleep(rule.seconds)
                    yield event
                case Action.DUPLICATE:
                    yield event
                    yield event
                case Action.STALL:
                    await never()
                case Action.KILL:
                    self._faults.kill()

    async def get_session(self, key: SessionKey) -> SessionPlacement | None:
        return await self._call("get_session", lambda: self._inner.get_session(key))

    async def set_session(
        self, key: SessionKey, placement: SessionPlacement, expected_epoch: int
    ) -> SessionPlacement:
        return await self._call("set_session", lambda: self._inner.set_session(key, placement, expected_epoch))

    async def prefix_holders(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        return await self._call("prefix_holders", lambda: self._inner.prefix_holders(hashes))

    async def add_prefix(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        await self._call("add_prefix", lambda: self._inner.add_prefix(worker_id, hashes))

    async def take_quota(self, tenant: TenantId, amount: float, quota: Quota) -> float:
        return await self._call("take_quota", lambda: self._inner.take_quota(tenant, amount, quota))

    async def close(self) -> None:
        await self._inner.close()

    async def _call(self, name: str, make: Callable[[], Awaitable[T]]) -> T:
        rule = self._faults.meet(Seam.REGISTRY, {"call": name})
        match rule.do if rule is not None else None:
            case Action.DELAY if rule is not None:
                await asyncio.sleep(rule.seconds)
            case Action.DUPLICATE:
                await make()
            case Action.STALL | Action.DROP:
                await never()
            case Action.CUT:
                raise ConnectionError("cut by a fault rule")
            case Action.KILL:
                self._faults.kill()
        return await make()
