"""The registry without Redis: one router's own memory. Also the twin that tests of everybody else use."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from kvrelay.core.clock import Clock, SystemClock
from kvrelay.core.config import PlacementSettings
from kvrelay.core.ids import BlockHash, Incarnation, TenantId, WorkerId
from kvrelay.core.placement import Load, SessionKey, SessionPlacement, WorkerRecord
from kvrelay.placement.registry import (
    MAX_HOLDERS,
    PREFIX_TTL_S,
    EventKind,
    Quota,
    RegistryEvent,
    marked_positions,
)

MAX_SESSIONS = 65_536
MAX_PREFIXES = 262_144
MAX_TENANTS = 4_096
MAX_PENDING_EVENTS = 1_024
"""A subscriber that falls further behind loses the oldest; `workers` tells it the truth."""

K = TypeVar("K")
V = TypeVar("V")


class _Expiring(Generic[K, V]):
    """A bounded map whose entries run out; the one written longest ago makes room."""

    def __init__(self, clock: Clock, max_entries: int) -> None:
        self._clock = clock
        self._max_entries = max_entries
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry[0] <= self._clock.now():
            del self._entries[key]
            return None
        return entry[1]

    def set(self, key: K, value: V, ttl_s: float) -> None:
        self._entries[key] = (self._clock.now() + ttl_s, value)
        self._entries.move_to_end(key)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)


@dataclass(slots=True)
class _Lease:
    record: WorkerRecord
    load: Load
    expires: float


@dataclass(frozen=True, slots=True)
class _Bucket:
    level: float
    at: float


class MemoryRegistry:
    """Implements `Registry`. Lives in one event loop."""

    def __init__(self, settings: PlacementSettings | None = None, clock: Clock | None = None) -> None:
        self._settings = settings or PlacementSettings()
        self._clock = clock or SystemClock()
        self._leases: dict[WorkerId, _Lease] = {}
        self._sessions: _Expiring[SessionKey, SessionPlacement] = _Expiring(self._clock, MAX_SESSIONS)
        self._holders: _Expiring[BlockHash, dict[WorkerId, float]] = _Expiring(self._clock, MAX_PREFIXES)
        self._buckets: _Expiring[TenantId, _Bucket] = _Expiring(self._clock, MAX_TENANTS)
        self._subscribers: set[asyncio.Queue[RegistryEvent]] = set()

    async def register(self, record: WorkerRecord, load: Load) -> None:
        self._grant(record, load)
        self._announce(EventKind.JOIN, record)

    async def renew(self, record: WorkerRecord, load: Load) -> None:
        before = self._alive(record.worker_id)
        self._grant(record, load)
        if before is None or before.record.incarnation != record.incarnation:
            self._announce(EventKind.JOIN, record)
        if load.draining and (before is None or not before.load.draining):
            self._announce(EventKind.DRAIN, record)

    async def leave(self, record: WorkerRecord) -> None:
        lease = self._leases.get(record.worker_id)
        if lease is not None and lease.record.incarnation == record.incarnation:
            del self._leases[record.worker_id]
        self._announce(EventKind.LEAVE, record)

    async def workers(self) -> list[WorkerRecord]:
        leases = [self._alive(worker_id) for worker_id in sorted(self._leases)]
        return [lease.record for lease in leases if lease is not None]

    async def events(self) -> AsyncIterator[RegistryEvent]:
        queue: asyncio.Queue[RegistryEvent] = asyncio.Queue(MAX_PENDING_EVENTS)
        self._subscribers.add(queue)
        try:
            for record in await self.workers():
                yield _event(EventKind.JOIN, record)
            while True:
                yield await queue.get()
        finally:
            self._subscribers.discard(queue)

    async def get_session(self, key: SessionKey) -> SessionPlacement | None:
        return self._sessions.get(key)

    async def set_session(
        self, key: SessionKey, placement: SessionPlacement, expected_epoch: int
    ) -> SessionPlacement:
        current = self._sessions.get(key)
        if current is not None and current.epoch != expected_epoch:
            return current
        stored = replace(placement, epoch=expected_epoch + 1)
        self._sessions.set(key, stored, self._settings.session_ttl_s)
        return stored

    async def prefix_holders(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        held: dict[WorkerId, int] = {}
        for position in marked_positions(len(hashes)):
            for worker_id in self._fresh_holders(hashes[position]):
                held[worker_id] = position + 1
        return held

    async def add_prefix(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        expires = self._clock.now() + PREFIX_TTL_S
        for position in marked_positions(len(hashes)):
            holders = self._fresh_holders(hashes[position])
            holders.pop(worker_id, None)
            newest = [*holders.items(), (worker_id, expires)][-MAX_HOLDERS:]
            self._holders.set(hashes[position], dict(newest), PREFIX_TTL_S)

    async def take_quota(self, tenant: TenantId, amount: float, quota: Quota) -> float:
        now = self._clock.now()
        bucket = self._buckets.get(tenant) or _Bucket(quota.burst, now)
        level = min(quota.burst, bucket.level + (now - bucket.at) * quota.rate_per_s)
        missing = amount - level
        if missing <= 0:
            level -= amount
        self._buckets.set(tenant, _Bucket(level, now), quota.burst / quota.rate_per_s + 1.0)
        return max(0.0, missing / quota.rate_per_s)

    async def close(self) -> None:
        self._subscribers.clear()

    def _grant(self, record: WorkerRecord, load: Load) -> None:
        expires = self._clock.now() + self._settings.lease_s
        self._leases[record.worker_id] = _Lease(record, load, expires)

    def _alive(self, worker_id: WorkerId) -> _Lease | None:
        lease = self._leases.get(worker_id)
        if lease is not None and lease.expires <= self._clock.now():
            del self._leases[worker_id]
            return None
        return lease

    def _fresh_holders(self, block: BlockHash) -> dict[WorkerId, float]:
        now = self._clock.now()
        return {worker_id: expires for worker_id, expires in (self._holders.get(block) or {}).items() if expires > now}

    def _announce(self, kind: EventKind, record: WorkerRecord) -> None:
        for queue in self._subscribers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(_event(kind, record))


def _event(kind: EventKind, record: WorkerRecord) -> RegistryEvent:
    joined = record if kind is EventKind.JOIN else None
    return RegistryEvent(kind, record.worker_id, Incarnation(record.incarnation), joined)
