"""Presence in the registry, and going down without anybody noticing."""

from __future__ import annotations

import asyncio

from kvrelay.core.config import PlacementSettings
from kvrelay.core.events import Finished, FinishReason
from kvrelay.core.placement import Load, WorkerRecord
from kvrelay.placement.memory import MemoryRegistry
from kvrelay.worker.drain import drain
from kvrelay.worker.presence import Presence
from tests.support.virtual_time import VirtualTimeLoop, run_virtual
from tests.worker.support import RECORD, AttachStory, attach_story, key, local_start

SETTINGS = PlacementSettings(lease_s=15.0, renew_s=5.0)


class NotedRegistry(MemoryRegistry):
    """Keeps the load of every renewal."""

    def __init__(self, clock: VirtualTimeLoop, settings: PlacementSettings) -> None:
        super().__init__(settings, clock)
        self.renewals: list[Load] = []

    async def renew(self, record: WorkerRecord, load: Load) -> None:
        self.renewals.append(load)
        await super().renew(record, load)


def virtual_registry() -> NotedRegistry:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return NotedRegistry(loop, SETTINGS)


def test_the_lease_is_kept_for_as_long_as_the_worker_lives() -> None:
    async def story() -> None:
        registry = virtual_registry()
        presence = Presence(registry, RECORD, Load, SETTINGS)
        task = asyncio.create_task(presence.keep())
        await asyncio.sleep(60.1)
        assert len(registry.renewals) == 12
        assert await registry.workers() == [RECORD]
        task.cancel()
        await presence.leave()
        assert await registry.workers() == []

    run_virtual(story())


def test_news_is_told_at_once() -> None:
    async def story() -> None:
        registry = virtual_registry()
        presence = Presence(registry, RECORD, lambda: Load(draining=True), SETTINGS)
        task = asyncio.create_task(presence.keep())
        await asyncio.sleep(0.1)
        presence.announce()
        await asyncio.sleep(0.1)
        assert registry.renewals == [Load(draining=True)]
        task.cancel()

    run_virtual(story())


def test_a_registry_that_hangs_does_not_hold_up_the_exit() -> None:
    async def story() -> None:
        registry = virtual_registry()
        registry.leave = lambda record: asyncio.sleep(3600.0)  # type: ignore[method-assign]
        loop = asyncio.get_running_loop()
        before = loop.time()
        await Presence(registry, RECORD, Load, SETTINGS).leave()
        assert loop.time() - before == 2 * SETTINGS.call_timeout_s

    run_virtual(story())


def presence_of(story: AttachStory) -> Presence:
    return Presence(MemoryRegistry(SETTINGS, story.clock), RECORD, story.service.load, SETTINGS)


async def test_draining_waits_for_the_last_sequence() -> None:
    async with attach_story() as story:
        router = await story.router()
        await router.start(local_start())
        await story.inbox.until(lambda: len(story.inbox.starts) == 1)
        draining = asyncio.create_task(drain(story.inbox, story.service, presence_of(story), grace_s=60.0))
        message = await router.read()
        while message is not None and not message.beat.draining:
            message = await router.read()
        assert story.inbox.is_draining
        assert not draining.done()
        story.step(Finished(key(), FinishReason.LENGTH))
        assert await draining


async def test_what_does_not_end_in_time_is_left() -> None:
    async with attach_story() as story:
        router = await story.router()
        await router.start(local_start())
        await story.inbox.until(lambda: len(story.inbox.starts) == 1)
        assert not await drain(story.inbox, story.service, presence_of(story), grace_s=0.01)
        assert story.service.num_open == 1
