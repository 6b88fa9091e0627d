"""The store itself: garbage, flushes, expiry; URLs; the server we bring along."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from kvrelay.core.clock import SystemClock
from kvrelay.core.config import PlacementSettings
from kvrelay.core.errors import ConfigError
from kvrelay.placement.embedded import EmbeddedRedis
from kvrelay.placement.keys import Keys
from kvrelay.placement.open import open_redis, open_registry
from kvrelay.placement.redis_registry import RedisRegistry
from tests.placement.builders import hashes, key, load, session_at, worker
from tests.support.redis_server import settings_for


@pytest.fixture
async def raw(redis_server: EmbeddedRedis) -> AsyncIterator[Redis]:
    client: Redis = Redis.from_url(redis_server.url)
    yield client
    await client.aclose()


@pytest.fixture
async def registry(redis_settings: PlacementSettings) -> AsyncIterator[RedisRegistry]:
    opened = open_redis(redis_settings)
    yield opened
    await opened.close()


GARBAGE = [
    b"", b"not json", b"[]", b"null", b'{"epoch": 3}', b"\xff\xfe",
    b'{"decode_worker":"d","incarnation":"i","epoch":1.5,"tail_hash":"","num_tokens":1}',
    b'{"decode_worker":"d","incarnation":"i","epoch":"5","tail_hash":"","num_tokens":1}',
]


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_garbage_in_a_session_is_replaced(
    registry: RedisRegistry, redis_settings: PlacementSettings, raw: Redis, garbage: bytes
) -> None:
    await raw.set(Keys(redis_settings.namespace).session(key("chat")), garbage)
    assert await registry.get_session(key("chat")) is None
    stored = await registry.set_session(key("chat"), session_at(worker("d0")), 0)
    assert stored == session_at(worker("d0"), epoch=1) == await registry.get_session(key("chat"))


async def test_a_session_key_of_another_type_is_replaced(
    registry: RedisRegistry, redis_settings: PlacementSettings, raw: Redis
) -> None:
    name = Keys(redis_settings.namespace).session(key("chat"))
    await raw.lpush(name, "x")
    stored = await registry.set_session(key("chat"), session_at(worker("d0")), 0)
    assert stored == await registry.get_session(key("chat"))


async def test_a_session_is_readable_in_redis_and_expires(
    registry: RedisRegistry, redis_settings: PlacementSettings, raw: Redis
) -> None:
    await registry.set_session(key("chat-1", tenant="acme"), session_at(worker("d0")), 0)
    name = f"kvr:{redis_settings.namespace}:s:acme:chat-1"
    assert b'"decode_worker":"d0"' in (await raw.get(name) or b"")
    assert 0 < await raw.ttl(name) <= redis_settings.session_ttl_s


async def test_everything_is_registered_again_after_a_flush(registry: RedisRegistry, raw: Redis) -> None:
    workers = [worker("d0"), worker("p0")]
    for record in workers:
        await registry.register(record, load())
    await raw.flushall()
    assert await registry.workers() == []
    for record in workers:
        await registry.renew(record, load())
    assert await registry.workers() == workers


async def test_a_lost_lease_leaves_the_index(
    registry: RedisRegistry, redis_settings: PlacementSettings, raw: Redis
) -> None:
    await registry.register(worker("d0"), load())
    names = Keys(redis_settings.namespace)
    assert 0 < await raw.pttl(names.worker(worker("d0").worker_id)) <= 15_000
    await raw.delete(names.worker(worker("d0").worker_id))
    assert await registry.workers() == []
    assert await raw.scard(names.index) == 0


async def test_garbage_workers_are_skipped(
    registry: RedisRegistry, redis_settings: PlacementSettings, raw: Redis
) -> None:
    await registry.register(worker("d0"), load())
    names = Keys(redis_settings.namespace)
    await raw.sadd(names.index, "d1")
    await raw.set(names.worker(worker("d1").worker_id), b"garbage")
    await raw.sadd(names.index, b"\xff\xfe")
    assert await registry.workers() == [worker("d0")]


async def test_garbage_holders_are_nobody(
    registry: RedisRegistry, redis_settings: PlacementSettings, raw: Redis
) -> None:
    await registry.add_prefix(worker("d0").worker_id, hashes(2))
    await raw.zadd(Keys(redis_settings.namespace).prefix(hashes(2)[0]), {b"\xff\xfe": 2.0**53})
    assert (await registry.prefix_holders(hashes(2)))[worker("d0").worker_id] == 2


async def test_prefix_keys_expire(registry: RedisRegistry, redis_settings: PlacementSettings, raw: Redis) -> None:
    await registry.add_prefix(worker("d0").worker_id, hashes(2))
    assert 0 < await raw.pttl(Keys(redis_settings.namespace).prefix(hashes(2)[0])) <= 600_000


async def test_a_cluster_takes_the_same_calls() -> None:
    server = EmbeddedRedis(extra_args=("--cluster-enabled", "yes"))
    server.start()
    try:
        node: Redis = Redis.from_url(server.url)
        await node.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16_383)
        await node.aclose()
        registry = open_redis(settings_for(server.url.replace("redis://", "redis+cluster://").removesuffix("/0")))
        await registry.register(worker("d0"), load())
        assert await registry.workers() == [worker("d0")]
        stored = await registry.set_session(key("chat"), session_at(worker("d0")), 0)
        assert await registry.get_session(key("chat")) == stored
        await registry.add_prefix(worker("d0").worker_id, hashes(20))
        assert await registry.prefix_holders(hashes(20)) == {"d0": 20}
        await registry.close()
    finally:
        server.stop()


@pytest.mark.parametrize(
    "url", ["http://localhost", "localhost:6379", "redis+sentinel://host:26379", "redis://:secret@host:notaport/0"]
)
async def test_bad_urls_are_refused_without_their_password(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        open_registry(PlacementSettings(redis_url=url), SystemClock())
    assert "secret" not in str(raised.value)


async def test_no_url_is_memory() -> None:
    registry = open_registry(PlacementSettings(), SystemClock())
    await registry.register(worker("d0"), load())
    assert await registry.workers() == [worker("d0")]
    await registry.close()


def test_the_embedded_server_is_gone_after_stop() -> None:
    server = EmbeddedRedis()
    server.start()
    assert server.is_running
    pid = server.pid
    assert pid
    server.stop()
    server.stop()
    assert not server.is_running


def test_a_taken_port_is_an_error(redis_server: EmbeddedRedis) -> None:
    server = EmbeddedRedis()
    with pytest.raises(ConfigError, match=str(redis_server.port)):
        server.start(redis_server.port)
    assert not server.is_running
