"""One real Redis-protocol server per test run, and a namespace of its own for every test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from kvrelay.core.config import PlacementSettings
from kvrelay.placement.embedded import EmbeddedRedis

_NAMESPACES = itertools.count()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_settings(redis_server: EmbeddedRedis) -> PlacementSettings:
    return settings_for(redis_server.url)


def settings_for(url: str, call_timeout_s: float = 10.0, lease_s: float = 15.0) -> PlacementSettings:
    """Slow machines are no trouble by default: a test about time limits sets its own."""
    namespace = f"test-{next(_NAMESPACES)}"
    return PlacementSettings(redis_url=url, namespace=namespace, call_timeout_s=call_timeout_s, lease_s=lease_s)
