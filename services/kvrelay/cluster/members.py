"""Which workers a cluster has, asked from outside of it: the registry in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvrelay.cluster.state import ClusterState
from kvrelay.core.clock import SystemClock
from kvrelay.core.config import PlacementSettings
from kvrelay.core.placement import WorkerRecord
from kvrelay.placement.open import open_registry


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
