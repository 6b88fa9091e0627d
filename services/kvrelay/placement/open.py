"""From a URL to a registry.

    (empty)                                      this process's memory
    redis://[user:password@]host:port/db         one server; rediss:// with TLS
    redis+sentinel://host:port,host:port/NAME    the current master of NAME, asked anew for every connection
    redis+cluster://[user:password@]host:port    a Redis cluster; rediss+cluster:// with TLS
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

from kvrelay.core.clock import Clock
from kvrelay.core.config import PlacementSettings
from kvrelay.core.errors import ConfigError
from kvrelay.core.faults import Faults
from kvrelay.placement.faults import FaultyRegistry
from kvrelay.placement.guarded import MAX_CALLS, BreakerWatch, GuardedRegistry, Store
from kvrelay.placement.memory import MemoryRegistry
from kvrelay.placement.redis_registry import TROUBLE, RedisRegistry
from kvrelay.placement.registry import Registry

MAX_CONNECTIONS = 2 * MAX_CALLS
"""Calls under way, calls being cancelled, the subscription. `GuardedRegistry` never asks for more."""
_FIRST_ANSWER_S = 5.0
SCHEMES = "redis://, rediss://, redis+sentinel://, rediss+sentinel://, redis+cluster://, rediss+cluster://"


def open_registry(
    settings: PlacementSettings, clock: Clock, watch: BreakerWatch | None = None, faults: Faults | None = None
) -> Registry:
    """Connects on first use. Call from the event loop that will use it; close it when done. Raises ConfigError."""
    inner: Registry = open_redis(settings) if settings.redis_url else MemoryRegistry(settings, clock)
    store: Store | None = inner if isinstance(inner, RedisRegistry) else None
    if faults is not None:
        store = FaultyRegistry(inner, faults, inner.drop_connections if isinstance(inner, RedisRegistry) else _none)
    return inner if store is None else GuardedRegistry(store, clock, settings.call_timeout_s, watch)


async def _none() -> None:
    """Memory has no connections to drop."""


async def why_no_redis(settings: PlacementSettings) -> str:
    """Empty if the server at `redis_url` answers. For a start by hand, where silence is most likely a wrong URL."""
    registry = open_redis(settings)
    try:
        async with asyncio.timeout(_FIRST_ANSWER_S):
            await registry.workers()
    except TimeoutError:
        return f"no answer within {_FIRST_ANSWER_S:g} s"
    except TROUBLE as error:
        return str(error).rstrip(".")
    finally:
        await registry.close()
    return ""


def open_redis(settings: PlacementSettings) -> RedisRegistry:
    """Redis without the breaker: raises for every trouble."""
    url = settings.redis_url
    scheme = url.partition("://")[0]
    if scheme not in {part.removesuffix("://") for part in SCHEMES.split(", ")}:
        raise ConfigError(f"placement.redis_url {shown(url)!r}: expected one of {SCHEMES}")
    options = _options(settings)
    try:
        if scheme.endswith("+sentinel"):
            return RedisRegistry(_sentinel(url, options), settings)
        plain = url.replace("+cluster", "", 1)
        if scheme.endswith("+cluster"):
            return RedisRegistry(RedisCluster.from_url(plain, max_connections=MAX_CONNECTIONS, **options), settings)
        return RedisRegistry(Redis.from_pool(ConnectionPool.from_url(plain, **_pooled(options))), settings)
    except ValueError as error:
        raise ConfigError(f"placement.redis_url {shown(url)!r}: {error}") from error


def _options(settings: PlacementSettings) -> dict[str, Any]:
    return {
        "socket_timeout": settings.call_timeout_s,
        "socket_connect_timeout": settings.call_timeout_s,
        "socket_keepalive": True,
        # RESP2: works with every server, and no unasked message ever comes between a question and its answer.
        "protocol": 2,
    }


def _pooled(options: dict[str, Any]) -> dict[str, Any]:
    """One quiet retry, on a new connection: a server that restarted leaves dead connections in the pool."""
    retry = Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))
    return {**options, "max_connections": MAX_CONNECTIONS, "retry": retry}


def _sentinel(url: str, options: dict[str, Any]) -> Redis:
    parts = urlsplit(url)
    hosts = parts.netloc.rpartition("@")[2].split(",")
    name, _, db = parts.path.strip("/").partition("/")
    if not name or not all(hosts):
        raise ConfigError(f"placement.redis_url {shown(url)!r}: write redis+sentinel://host:26379,host:26379/MASTER")
    nodes = [(host, int(port or 26379)) for host, _, port in (entry.partition(":") for entry in hosts)]
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    sentinel = Sentinel(nodes, sentinel_kwargs=dict(options))  # type: ignore[no-untyped-call]
    client: Redis = sentinel.master_for(
        name,
        db=int(db or 0),
        username=unquote(user) or None,
        password=unquote(password) or None,
        ssl=parts.scheme.startswith("rediss"),
        **_pooled(options),
    )
    return client


def shown(url: str) -> str:
    """Without the password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
