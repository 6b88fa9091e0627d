"""The registry in Redis. Raises when Redis does: `guarded.py` stands in front and decides what trouble means.

Leases are keys with a TTL. A renew that finds its key gone (flush, failover, a lost lease) writes it anew and joins
again, so the store heals by itself within one renew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from kvrelay.core.config import PlacementSettings
from kvrelay.core.ids import BlockHash, TenantId, WorkerId
from kvrelay.core.placement import Load, SessionKey, SessionPlacement, WorkerRecord
from kvrelay.placement import scripts
from kvrelay.placement.codec import WorkerEntry, decode, encode
from kvrelay.placement.keys import Keys
from kvrelay.placement.registry import (
    MAX_HOLDERS,
    PREFIX_TTL_S,
    EventKind,
    Quota,
    RegistryEvent,
    marked_positions,
)

TROUBLE = (RedisError, OSError, TimeoutError)
"""Everything that a Redis call may raise because of Redis or the way to it."""
QUIET_S = 5.0
"""A subscription that is silent for so long is pinged; a ping unanswered for as long again ends it."""
RECONNECT_S = 1.0


class RedisRegistry:
    """Implements `Registry`. Owns the client and closes it."""

    def __init__(self, client: Redis | RedisCluster, settings: PlacementSettings) -> None:
        self._client = client
        self._keys = Keys(settings.namespace)
        self._lease_ms = round(settings.lease_s * 1_000)
        self._session_ttl_ms = round(settings.session_ttl_s * 1_000)

    async def register(self, record: WorkerRecord, load: Load) -> None:
        await self._grant(record, load)
        await self._publish(EventKind.JOIN, record)

    async def renew(self, record: WorkerRecord, load: Load) -> None:
        before = await self._grant(record, load)
        if before is None or before.record.incarnation != record.incarnation:
            await self._publish(EventKind.JOIN, record)
        if load.draining and (before is None or not before.load.draining):
            await self._publish(EventKind.DRAIN, record)

    async def leave(self, record: WorkerRecord) -> None:
        key = self._keys.worker(record.worker_id)
        if await self._eval(scripts.LEAVE, key, record.incarnation):
            await self._redis.srem(self._keys.index, record.worker_id)
        await self._publish(EventKind.LEAVE, record)

    async def workers(self) -> list[WorkerRecord]:
        names = sorted(await self._redis.smembers(self._keys.index))
        if not names:
            return []
        ids = [WorkerId(name.decode(errors="replace")) for name in names]
        async with self._redis.pipeline(transaction=False) as pipe:
            for worker_id in ids:
                pipe.get(self._keys.worker(worker_id))
            values = await pipe.execute()
        expired = [name for name, value in zip(names, values, strict=True) if value is None]
        if expired:
            await self._redis.srem(self._keys.index, *expired)
        entries = [decode(value, WorkerEntry) for value in values]
        return [entry.record for entry in entries if entry is not None]

    async def events(self) -> AsyncIterator[RegistryEvent]:
        while True:
            try:
                async for event in self._subscription():
                    yield event
            except TROUBLE:
                await asyncio.sleep(RECONNECT_S)

    async def get_session(self, key: SessionKey) -> SessionPlacement | None:
        return decode(await self._redis.get(self._keys.session(key)), SessionPlacement)

    async def set_session(
        self, key: SessionKey, placement: SessionPlacement, expected_epoch: int
    ) -> SessionPlacement:
        offered = replace(placement, epoch=expected_epoch + 1)
        stored = await self._eval(
            scripts.SET_SESSION, self._keys.session(key), expected_epoch, encode(offered), self._session_ttl_ms
        )
        return decode(stored, SessionPlacement) or offered

    async def prefix_holders(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        positions = marked_positions(len(hashes))
        if not positions:
            return {}
        async with self._redis.pipeline(transaction=False) as pipe:
            for position in positions:
                pipe.zrange(self._keys.prefix(hashes[position]), 0, MAX_HOLDERS - 1)
            answers: list[list[bytes]] = await pipe.execute()
        held: dict[WorkerId, int] = {}
        for position, holders in zip(positions, answers, strict=True):
            held.update({WorkerId(name.decode(errors="replace")): position + 1 for name in holders})
        return held

    async def add_prefix(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        positions = marked_positions(len(hashes))
        if not positions:
            return
        ttl_ms = round(PREFIX_TTL_S * 1_000)
        async with self._redis.pipeline(transaction=False) as pipe:
            for position in positions:
                pipe.eval(scripts.ADD_HOLDER, 1, self._keys.prefix(hashes[position]), worker_id, ttl_ms, MAX_HOLDERS)
            await pipe.execute()

    async def take_quota(self, tenant: TenantId, amount: float, quota: Quota) -> float:
        missing = await self._eval(
            scripts.TAKE_QUOTA, self._keys.quota(tenant), amount, quota.rate_per_s, quota.burst
        )
        return float(missing)

    async def close(self) -> None:
        await self._redis.aclose()

    async def drop_connections(self) -> None:
        """Forget idle connections: the next call resolves the name and connects anew (after a failover)."""
        if isinstance(self._client, RedisCluster):
            await self._client.aclose()
        else:
            await self._client.connection_pool.disconnect(inuse_connections=False)

    @property
    def _redis(self) -> Any:
        """The client's stubs type every answer as a union of both its flavours; here all answers are awaited bytes."""
        return self._client

    async def _eval(self, script: str, key: str, *args: str | bytes | int | float) -> Any:
        return await self._redis.eval(script, 1, key, *args)

    async def _grant(self, record: WorkerRecord, load: Load) -> WorkerEntry | None:
        """Write the lease; returns what it said before."""
        value = encode(WorkerEntry(record, load))
        before = await self._redis.set(self._keys.worker(record.worker_id), value, px=self._lease_ms, get=True)
        await self._redis.sadd(self._keys.index, record.worker_id)
        return decode(before, WorkerEntry)

    async def _publish(self, kind: EventKind, record: WorkerRecord) -> None:
        joined = record if kind is EventKind.JOIN else None
        event = RegistryEvent(kind, record.worker_id, record.incarnation, joined)
        await self._redis.publish(self._keys.events, encode(event))

    async def _subscription(self) -> AsyncIterator[RegistryEvent]:
        """One connection's worth of events; raises when the connection is lost."""
        async with self._client.pubsub() as channel:
            await channel.subscribe(self._keys.events)
            for record in await self.workers():
                yield RegistryEvent(EventKind.JOIN, record.worker_id, record.incarnation, record)
            pinged = False
            while True:
                message = await channel.get_message(timeout=QUIET_S)
                if message is None:
                    if pinged:
                        raise RedisConnectionError("the subscription does not answer")
                    await channel.ping()
                pinged = message is None
                event = decode(message["data"], RegistryEvent) if message and message["type"] == "message" else None
                if event is not None:
                    yield event
