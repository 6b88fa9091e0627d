"""The breaker, and Redis in trouble behind it: slow, black-holed, failed over."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from kvrelay.core.clock import FakeClock
from kvrelay.core.config import PlacementSettings
from kvrelay.core.ids import TenantId
from kvrelay.observe.metrics import RouterMetrics
from kvrelay.placement.breaker import Breaker, State
from kvrelay.placement.embedded import EmbeddedRedis
from kvrelay.placement.guarded import MAX_CALLS, GuardedRegistry
from kvrelay.placement.open import MAX_CONNECTIONS, open_redis
from kvrelay.placement.registry import Quota
from tests.placement.builders import hashes, key, load, session_at, worker
from tests.support.redis_server import settings_for
from tests.support.tcp_proxy import TcpProxy

SHORT_S = 0.05


def test_the_life_of_a_breaker() -> None:
    clock, seen = FakeClock(), list[State]()
    breaker = Breaker(clock, seen.append)
    for _ in range(3):
        assert breaker.allow()
        breaker.failed()
    assert not breaker.allow()
    for pause in (1.0, 2.0, 4.0, 4.0):
        clock.advance(pause - 0.01)
        assert not breaker.allow()
        clock.advance(0.02)
        assert breaker.allow()
        assert not breaker.allow(), "one probe at a time"
        breaker.failed()
    clock.advance(4.1)
    assert breaker.allow()
    breaker.succeeded()
    assert breaker.state is State.CLOSED
    assert seen[0] is State.OPEN
    assert seen[-1] is State.CLOSED


def test_a_success_in_between_starts_the_count_anew() -> None:
    breaker = Breaker(FakeClock())
    for _ in range(10):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert breaker.state is State.CLOSED


def test_an_abandoned_probe_is_made_again() -> None:
    clock = FakeClock()
    breaker = Breaker(clock)
    for _ in range(3):
        breaker.failed()
    clock.advance(1.1)
    assert breaker.allow()
    breaker.abandoned()
    assert breaker.allow()


@pytest.fixture
async def proxy(redis_server: EmbeddedRedis) -> AsyncIterator[TcpProxy]:
    async with TcpProxy(redis_server.port) as opened:
        yield opened


def guarded(settings: PlacementSettings, clock: FakeClock, metrics: RouterMetrics | None = None) -> GuardedRegistry:
    return GuardedRegistry(open_redis(settings), clock, settings.call_timeout_s, metrics)


async def test_cancelled_lookups_never_answer_somebody_else(proxy: TcpProxy) -> None:
    """RED-01: 200 lookups cancelled at random moments among 200 that are not."""
    dice = random.Random(1)
    registry = guarded(settings_for(proxy.url), FakeClock())
    for index in range(20):
        await registry.set_session(key(f"s{index}"), session_at(worker(f"d{index}")), 0)
    proxy.delay_s = 0.01

    async def ask(index: int, patience_s: float) -> bool:
        try:
            found = await asyncio.wait_for(registry.get_session(key(f"s{index}")), patience_s)
        except TimeoutError:
            return False
        assert found is not None
        assert found.decode_worker == f"d{index}"
        return True

    patience = [dice.uniform(0.0, 0.03) if position % 2 else 60.0 for position in range(400)]
    answered = await asyncio.gather(*(ask(dice.randrange(20), seconds) for seconds in patience))
    assert all(answered[::2])
    assert not all(answered)
    assert proxy.max_connections <= MAX_CONNECTIONS
    assert registry.breaker.state is State.CLOSED
    proxy.delay_s = 0.0
    assert await ask(3, 60.0)
    await registry.close()


async def test_a_black_hole_costs_hints_and_nothing_else(proxy: TcpProxy) -> None:
    """RED-04: every call ends, lookups are empty, writes are dropped and counted, and it heals."""
    clock, metrics = FakeClock(), RouterMetrics()
    settings = settings_for(proxy.url, call_timeout_s=SHORT_S)
    registry = guarded(settings, clock, metrics)
    direct = open_redis(replace(settings, call_timeout_s=10.0))
    await direct.set_session(key("chat"), session_at(worker("d0")), 0)
    proxy.black_hole = True
    answers = await asyncio.gather(*(registry.get_session(key("chat")) for _ in range(500)))
    assert answers == [None] * 500
    assert registry.breaker.state is State.OPEN
    offer = session_at(worker("d1"))
    assert await registry.set_session(key("chat"), offer, 1) == offer
    assert await registry.workers() == []
    assert await registry.prefix_holders(hashes(3)) == {}
    assert await registry.take_quota(TenantId("t"), 1.0, Quota(1.0, 1.0)) == 0.0
    await registry.register(worker("d0"), load())
    await registry.renew(worker("d0"), load())
    await registry.leave(worker("d0"))
    await registry.add_prefix(worker("d0").worker_id, hashes(3))
    assert metrics.registry.get_sample_value("kvrelay_redis_breaker_open") == 1.0
    assert metrics.registry.get_sample_value("kvrelay_redis_dropped_total", {"kind": "write"}) == 6.0
    assert metrics.registry.get_sample_value("kvrelay_redis_dropped_total", {"kind": "lookup"}) == 502.0

    proxy.black_hole = False
    await _until_closed(registry, clock)
    found = await direct.get_session(key("chat"))
    assert found is not None
    assert found.decode_worker == "d0"
    assert proxy.max_connections <= MAX_CONNECTIONS + 1
    await direct.close()
    await registry.close()


async def test_a_server_that_is_gone_and_comes_back() -> None:
    server = EmbeddedRedis()
    server.start()
    clock = FakeClock()
    registry = guarded(settings_for(server.url), clock)
    await registry.register(worker("d0"), load())
    port = server.port
    server.stop()
    for _ in range(4):
        await registry.renew(worker("d0"), load())
    assert registry.breaker.state is State.OPEN
    server.start(port)
    try:
        await _until_closed(registry, clock)
        await registry.renew(worker("d0"), load())
        assert await registry.workers() == [worker("d0")]
    finally:
        await registry.close()
        server.stop()


async def test_an_outage_is_two_lines_in_the_log(
    proxy: TcpProxy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many requests meet it."""
    monkeypatch.setattr(logging.getLogger("kvrelay"), "propagate", True)
    caplog.set_level(logging.INFO, logger="kvrelay")
    clock = FakeClock()
    registry = guarded(replace(settings_for(proxy.url), call_timeout_s=SHORT_S), clock)
    proxy.black_hole = True
    for _ in range(4):
        for _ in range(4):
            await registry.workers()
        clock.advance(5.0)
    proxy.black_hole = False
    await _until_closed(registry, clock)
    await registry.close()
    said = [record.message for record in caplog.records if record.name == "kvrelay.placement.guarded"]
    assert [line.split(",")[0] for line in said] == ["Redis is away", "Redis is back"]


async def test_writes_find_the_new_primary(redis_server: EmbeddedRedis) -> None:
    """RED-02: the old primary lives on as a replica, connections stay up, the name points elsewhere."""
    old = EmbeddedRedis()
    old.start()
    try:
        async with TcpProxy(old.port) as proxy:
            registry = guarded(settings_for(proxy.url), FakeClock())
            await registry.register(worker("d0"), load())
            admin: Redis = Redis.from_url(old.url)
            await admin.execute_command("REPLICAOF", "127.0.0.1", str(redis_server.port))
            await admin.aclose()
            proxy.target_port = redis_server.port
            await registry.renew(worker("d0"), load())
            stored = await registry.set_session(key("chat"), session_at(worker("d0")), 0)
            assert registry.breaker.state is State.CLOSED
            assert await registry.workers() == [worker("d0")]
            assert await registry.get_session(key("chat")) == stored
            await registry.close()
    finally:
        old.stop()


async def test_events_survive_an_outage(redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.placement.redis_registry.RECONNECT_S", 0.01)
    monkeypatch.setattr("kvrelay.placement.redis_registry.QUIET_S", 0.05)
    async with TcpProxy(redis_server.port) as proxy:
        settings = settings_for(proxy.url, call_timeout_s=SHORT_S)
        registry = guarded(settings, FakeClock())
        direct = open_redis(replace(settings, redis_url=redis_server.url, call_timeout_s=10.0))
        await direct.register(worker("d0"), load())
        events = registry.events()
        first = await asyncio.wait_for(anext(events), 20.0)
        assert first.worker_id == "d0"
        waiting = asyncio.ensure_future(anext(events))
        proxy.black_hole = True
        await direct.register(worker("d1"), load())
        proxy.black_hole = False
        again = await asyncio.wait_for(waiting, 20.0)
        assert again.worker_id in {"d0", "d1"}
        seen = {again.worker_id}
        while "d1" not in seen:
            seen.add((await asyncio.wait_for(anext(events), 20.0)).worker_id)
        await direct.close()
        await registry.close()


async def _until_closed(registry: GuardedRegistry, clock: FakeClock) -> None:
    """Each round is one probe; a slow machine may lose the first ones to the time limit."""
    for _ in range(50):
        clock.advance(4.1)
        await registry.workers()
        if registry.breaker.state is State.CLOSED:
            return
    raise AssertionError("the breaker never closed")


def test_there_are_fewer_calls_than_connections() -> None:
    assert MAX_CALLS < MAX_CONNECTIONS
