"""Ray as a second source of worker endpoints: if Redis is away or was flushed, routers still find every worker.

    WorkerReplica: keep_announced ─▶ Ray's key-value store ─members─▶ RouterReplica: RegistryWithRay.workers

Only where to dial: load, sessions and prefixes stay Redis's. A worker that was killed is forgotten after `FORGET_S`.
Like Redis, Ray's store may be away: that is logged, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import ray.exceptions
from ray.experimental import internal_kv

from kvrelay.core.ids import BlockHash, TenantId, WorkerId
from kvrelay.core.placement import Load, SessionKey, SessionPlacement, WorkerRecord
from kvrelay.placement.codec import decode
from kvrelay.placement.registry import Quota, Registry, RegistryEvent

log = logging.getLogger(__name__)

ANNOUNCE_S = 4.0
FORGET_S = 15.0
_LOOKUP_TIMEOUT_S = 1.0
_NAMESPACE = b"kvrelay"
_TROUBLE = (ray.exceptions.RayError, RuntimeError, OSError)


@dataclass(frozen=True, slots=True)
class _Entry:
    unix_time: float
    record: WorkerRecord


class RayDirectory:
    """The workers of one application in Ray's key-value store. Calls block for a round trip to Ray's head node."""

    def __init__(self, application: str, unix_time: Callable[[], float] = time.time) -> None:
        self._prefix = f"worker:{application}:"
        self._unix_time = unix_time
        self._lock = threading.Lock()
        self._withdrawn: set[WorkerId] = set()

    def announce(self, record: WorkerRecord) -> None:
        """Nothing happens after `withdraw`: a call may still be on its thread when its task is cancelled."""
        entry = msgspec.json.encode(_Entry(self._unix_time(), record))
        with self._lock:
            if record.worker_id not in self._withdrawn:
                internal_kv._internal_kv_put(self._key(record), entry, overwrite=True, namespace=_NAMESPACE)

    def withdraw(self, record: WorkerRecord) -> None:
        with self._lock:
            self._withdrawn.add(record.worker_id)
            internal_kv._internal_kv_del(self._key(record), namespace=_NAMESPACE)

    def members(self) -> list[WorkerRecord]:
        oldest = self._unix_time() - FORGET_S
        keys = internal_kv._internal_kv_list(self._prefix.encode(), namespace=_NAMESPACE)
        entries = [decode(internal_kv._internal_kv_get(key, namespace=_NAMESPACE), _Entry) for key in keys]
        return [entry.record for entry in entries if entry is not None and entry.unix_time >= oldest]

    def _key(self, record: WorkerRecord) -> bytes:
        return f"{self._prefix}{record.worker_id}".encode()


async def keep_announced(directory: RayDirectory, record: WorkerRecord) -> None:
    """Until cancelled; then withdrawn."""
    try:
        while True:
            await _try(directory.announce, record)
            await asyncio.sleep(ANNOUNCE_S)
    finally:
        await _try(directory.withdraw, record)


async def _try(call: Callable[[WorkerRecord], None], record: WorkerRecord) -> None:
    try:
        await asyncio.to_thread(call, record)
    except _TROUBLE as error:
        log.warning("Ray's key-value store does not answer: %s", error)


class RegistryWithRay:
    """Implements `Registry`: the one from Redis, whose list of workers Ray completes."""

    def __init__(self, inner: Registry, directory: RayDirectory) -> None:
        self._inner = inner
        self._directory = directory
        self._lookup: asyncio.Task[list[WorkerRecord]] | None = None

    async def workers(self) -> list[WorkerRecord]:
        known = {record.worker_id: record for record in await self._members()}
        known |= {record.worker_id: record for record in await self._inner.workers()}
        return [known[worker_id] for worker_id in sorted(known)]

    async def _members(self) -> list[WorkerRecord]:
        """Empty if Ray does not answer in time. One lookup at a time: a stuck one holds one thread, not many."""
        if self._lookup is None:
            self._lookup = asyncio.create_task(asyncio.to_thread(self._directory.members))
        lookup = self._lookup
        done, _ = await asyncio.wait([lookup], timeout=_LOOKUP_TIMEOUT_S)
        if not done:
            return []
        self._lookup = None
        try:
            return lookup.result()
        except _TROUBLE as error:
            log.warning("Ray's key-value store does not answer: %s", error)
            return []

    async def register(self, record: WorkerRecord, load: Load) -> None:
        await self._inner.register(record, load)

    async def renew(self, record: WorkerRecord, load: Load) -> None:
        await self._inner.renew(record, load)

    async def leave(self, record: WorkerRecord) -> None:
        await self._inner.leave(record)

    def events(self) -> AsyncIterator[RegistryEvent]:
        return self._inner.events()

    async def get_session(self, key: SessionKey) -> SessionPlacement | None:
        return await self._inner.get_session(key)

    async def set_session(
        self, key: SessionKey, placement: SessionPlacement, expected_epoch: int
    ) -> SessionPlacement:
        return await self._inner.set_session(key, placement, expected_epoch)

    async def prefix_holders(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        return await self._inner.prefix_holders(hashes)

    async def add_prefix(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        await self._inner.add_prefix(worker_id, hashes)

    async def take_quota(self, tenant: TenantId, amount: float, quota: Quota) -> float:
        return await self._inner.take_quota(tenant, amount, quota)

    async def close(self) -> None:
        await self._inner.close()
