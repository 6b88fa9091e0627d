"""This worker in the registry: a lease, renewed by a task of its own.

    register ─▶ renew every `renew_s` (or at once when there is news: draining) ─▶ leave

The registry is advice to routers. Losing the lease, or the whole registry, never makes a worker exit or even pause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvrelay.core.config import PlacementSettings
from kvrelay.core.placement import Load, WorkerRecord
from kvrelay.placement.registry import Registry

log = logging.getLogger(__name__)


class Presence:
    def __init__(
        self, registry: Registry, record: WorkerRecord, load: Callable[[], Load], settings: PlacementSettings
    ) -> None:
        self._registry = registry
        self._record = record
        self._load = load
        self._settings = settings
        self._news = asyncio.Event()

    async def keep(self) -> None:
        """Register and renew for ever. Runs under the supervisor, which begins it again if the registry misbehaves."""
        await self._registry.register(self._record, self._load())
        while True:
            try:
                async with asyncio.timeout(self._settings.renew_s):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()
            await self._registry.renew(self._record, self._load())

    def announce(self) -> None:
        """Renew now rather than in a few seconds."""
        self._news.set()

    async def leave(self) -> None:
        try:
            async with asyncio.timeout(2 * self._settings.call_timeout_s):
                await self._registry.leave(self._record)
        except TimeoutError:
            log.warning("the registry did not hear that %s leaves; its lease will run out", self._record.worker_id)
