"""Which workers a cluster has, asked from outside of it: the registry in Redis, and what the owner noted last.

Redis is the fresher source and may be away; the owner asks Ray every few seconds and may have died. A process that has
ended is nobody's worker, whatever its lease says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import psutil

from kvrelay.cluster.state import ClusterState, Member
from kvrelay.core.clock import SystemClock
from kvrelay.core.config import PlacementSettings
from kvrelay.core.placement import WorkerRecord
from kvrelay.placement.open import open_registry


def members(state: ClusterState) -> list[Member]:
    """The workers that run now, in pools, ordered by id."""
    known = {member.id: member for member in state.workers}
    known |= {record.worker_id: member_of(record) for record in workers(state)}
    return sorted((each for each in known.values() if _runs(each.pid)), key=lambda each: (each.role, each.id))


def member_of(record: WorkerRecord) -> Member:
    return Member(
        record.role.value, record.worker_id, record.pid, record.address, record.num_blocks, record.identity.block_size,
        record.max_context,
    )


def workers(state: ClusterState) -> Sequence[WorkerRecord]:
    return registered_workers(state.redis, state.namespace)


def registered_workers(redis_url: str, namespace: str) -> Sequence[WorkerRecord]:
    """All that hold a lease, ordered by id; empty if Redis does not answer."""
    return asyncio.run(_ask(PlacementSettings(redis_url=redis_url, namespace=namespace)))


async def _ask(settings: PlacementSettings) -> Sequence[WorkerRecord]:
    registry = open_registry(settings, SystemClock())
    try:
        return await registry.workers()
    finally:
        await registry.close()


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
