"""One contract, three registries: memory, Redis, Redis behind the breaker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvrelay.core.clock import FakeClock, SystemClock
from kvrelay.core.config import PlacementSettings
from kvrelay.core.ids import TenantId, WorkerId
from kvrelay.placement.embedded import EmbeddedRedis
from kvrelay.placement.memory import MemoryRegistry
from kvrelay.placement.open import open_redis, open_registry
from kvrelay.placement.registry import EventKind, Quota, Registry, RegistryEvent, marked_positions
from tests.placement.builders import hashes, key, load, session_at, worker
from tests.support.redis_server import settings_for


@pytest.fixture(params=["memory", "redis", "guarded"])
async def registry(request: pytest.FixtureRequest, redis_server: EmbeddedRedis) -> AsyncIterator[Registry]:
    settings = settings_for(redis_server.url)
    opened: Registry
    if request.param == "memory":
        opened = MemoryRegistry(settings, FakeClock())
    elif request.param == "redis":
        opened = open_redis(settings)
    else:
        opened = open_registry(settings, SystemClock())
    yield opened
    await opened.close()


class Listener:
    """Collects a registry's events; `next` waits for one."""

    def __init__(self, registry: Registry) -> None:
        self._seen: asyncio.Queue[RegistryEvent] = asyncio.Queue()
        self._task = asyncio.ensure_future(self._listen(registry))

    async def _listen(self, registry: Registry) -> None:
        async for event in registry.events():
            self._seen.put_nowait(event)

    async def next(self) -> tuple[EventKind, str]:
        event = await asyncio.wait_for(self._seen.get(), 20.0)
        assert (event.record is not None) == (event.kind is EventKind.JOIN)
        return event.kind, event.worker_id

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_workers_come_and_go(registry: Registry) -> None:
    prefill, decode = worker("p0"), worker("d0")
    assert await registry.workers() == []
    await registry.register(prefill, load())
    await registry.register(decode, load())
    assert await registry.workers() == [decode, prefill]
    await registry.leave(prefill)
    assert await registry.workers() == [decode]


async def test_an_old_incarnation_cannot_take_the_new_one_away(registry: Registry) -> None:
    old, new = worker("d0", incarnation="one"), worker("d0", incarnation="two")
    await registry.register(old, load())
    await registry.register(new, load())
    await registry.leave(old)
    assert await registry.workers() == [new]


async def test_events_tell_join_drain_and_leave(registry: Registry) -> None:
    first, second = worker("d0"), worker("d1")
    await registry.register(first, load())
    listener = Listener(registry)
    assert await listener.next() == (EventKind.JOIN, "d0")
    await registry.register(second, load())
    assert await listener.next() == (EventKind.JOIN, "d1")
    await registry.renew(second, load())
    await registry.renew(second, load(draining=True))
    await registry.renew(second, load(draining=True))
    assert await listener.next() == (EventKind.DRAIN, "d1")
    await registry.leave(second)
    assert await listener.next() == (EventKind.LEAVE, "d1")
    await listener.stop()


async def test_renewing_a_lost_lease_joins_again(registry: Registry) -> None:
    record = worker("d0")
    listener = Listener(registry)
    await registry.renew(record, load())
    assert await listener.next() == (EventKind.JOIN, "d0")
    assert await registry.workers() == [record]
    await listener.stop()


async def test_sessions_are_compare_and_set(registry: Registry) -> None:
    d0, d1 = worker("d0"), worker("d1")
    assert await registry.get_session(key("chat")) is None
    won = await registry.set_session(key("chat"), session_at(d0), 0)
    assert won == session_at(d0, epoch=1)
    assert await registry.set_session(key("chat"), session_at(d1), 0) == won
    assert await registry.get_session(key("chat")) == won
    moved = await registry.set_session(key("chat"), session_at(d1), 1)
    assert moved == session_at(d1, epoch=2)
    assert await registry.get_session(key("chat", tenant="other")) is None


async def test_two_routers_place_one_new_session_once(registry: Registry) -> None:
    offers = [session_at(worker(f"d{index}")) for index in range(20)]
    answers = await asyncio.gather(*(registry.set_session(key("new"), offer, 0) for offer in offers))
    assert len(set(answers)) == 1
    assert answers[0] == await registry.get_session(key("new"))
    assert replace(answers[0], epoch=0) in offers


async def test_a_session_that_ran_out_is_replaced_whatever_epoch_is_expected(registry: Registry) -> None:
    assert (await registry.set_session(key("late"), session_at(worker("d0")), 7)).epoch == 8
    assert (await registry.set_session(key("late"), session_at(worker("d1")), 7)).decode_worker == "d0"


@pytest.mark.parametrize("odd", ["a:b", "a\nb", "", "x" * 5_000, "\ud83d", "früh", "{slot}", "*"])
async def test_odd_ids_have_keys_of_their_own(registry: Registry, odd: str) -> None:
    stored = await registry.set_session(key(odd, tenant=odd), session_at(worker("d0")), 0)
    assert await registry.get_session(key(odd, tenant=odd)) == stored
    assert await registry.get_session(key(odd)) is None


async def test_prefix_holders_count_leading_blocks(registry: Registry) -> None:
    chain = hashes(600)
    await registry.add_prefix(WorkerId("d0"), chain[:10])
    await registry.add_prefix(WorkerId("d1"), chain)
    await registry.add_prefix(WorkerId("d2"), hashes(4, seed=9))
    assert await registry.prefix_holders(chain[:40]) == {"d0": 10, "d1": 40}
    assert await registry.prefix_holders(chain) == {"d0": 10, "d1": 576}
    assert await registry.prefix_holders(()) == {}


async def test_prefix_holders_are_bounded_and_the_newest_stay(registry: Registry) -> None:
    for index in range(12):
        await registry.add_prefix(WorkerId(f"d{index:02}"), hashes(1))
    held = await registry.prefix_holders(hashes(1))
    assert len(held) == 8
    assert "d11" in held


async def test_quotas_are_a_bucket_per_tenant(registry: Registry) -> None:
    quota = Quota(rate_per_s=0.001, burst=10.0)
    assert await registry.take_quota(TenantId("a"), 4.0, quota) == 0.0
    assert await registry.take_quota(TenantId("a"), 6.0, quota) == 0.0
    missing = await registry.take_quota(TenantId("a"), 1.0, quota)
    assert 900.0 < missing <= 1_000.0
    assert await registry.take_quota(TenantId("b"), 1.0, quota) == 0.0


async def test_memory_forgets_what_has_expired() -> None:
    clock = FakeClock()
    registry = MemoryRegistry(PlacementSettings(lease_s=15, session_ttl_s=60), clock)
    await registry.register(worker("d0"), load())
    await registry.set_session(key("chat"), session_at(worker("d0")), 0)
    await registry.add_prefix(WorkerId("d0"), hashes(3))
    clock.advance(16)
    assert await registry.workers() == []
    assert await registry.get_session(key("chat")) is not None
    clock.advance(600)
    assert await registry.get_session(key("chat")) is None
    assert await registry.prefix_holders(hashes(3)) == {}


def test_marked_positions_do_not_depend_on_the_length() -> None:
    longest = marked_positions(8_192)
    assert len(longest) <= 256
    for length in (0, 1, 63, 64, 65, 511, 512, 4_000):
        assert marked_positions(length) == [position for position in longest if position < length]
