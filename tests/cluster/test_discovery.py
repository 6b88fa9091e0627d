"""Ray as a second source of workers: completes Redis's list, forgets the dead, is waited for by nobody."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import cast

import pytest

from kvrelay.cluster import discovery
from kvrelay.cluster.discovery import FORGET_S, RayDirectory, RegistryWithRay, keep_announced
from kvrelay.core.clock import FakeClock
from kvrelay.core.config import PlacementSettings
from kvrelay.core.handoff import KvIdentity, KvShard
from kvrelay.core.ids import Incarnation, WorkerId
from kvrelay.core.placement import Load, Role, WorkerRecord
from kvrelay.placement.memory import MemoryRegistry

RECORD = WorkerRecord(
    worker_id=WorkerId("decode-1"), incarnation=Incarnation("a"), role=Role.DECODE, address="127.0.0.1:1",
    push_address="127.0.0.1:2", model="m", identity=KvIdentity("m", "r", "t", 2, 2, 16, 16),
    shard=KvShard(0, 2, 0, 2, "float32"), num_blocks=10, max_context=160,
)  # fmt: skip


class FakeStore:
    """Ray's key-value store."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.trouble: Exception | None = None

    def _internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, namespace: bytes) -> None:
        self._answer()
        self.values[key] = value

    def _internal_kv_del(self, key: bytes, namespace: bytes) -> None:
        self._answer()
        self.values.pop(key, None)

    def _internal_kv_list(self, prefix: bytes, namespace: bytes) -> list[bytes]:
        self._answer()
        return [key for key in self.values if key.startswith(prefix)]

    def _internal_kv_get(self, key: bytes, namespace: bytes) -> bytes | None:
        return self.values.get(key)

    def _answer(self) -> None:
        if self.trouble is not None:
            raise self.trouble


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    fake = FakeStore()
    monkeypatch.setattr(discovery, "internal_kv", fake)
    return fake


def memory() -> MemoryRegistry:
    return MemoryRegistry(PlacementSettings(), FakeClock())


async def test_ray_completes_the_list_and_redis_wins(store: FakeStore) -> None:
    directory = RayDirectory("app")
    other = replace(RECORD, worker_id=WorkerId("prefill-1"), role=Role.PREFILL)
    directory.announce(RECORD)
    directory.announce(other)
    inner = memory()
    newer = replace(RECORD, incarnation=Incarnation("b"))
    await inner.register(newer, Load())
    registry = RegistryWithRay(inner, directory)
    assert await registry.workers() == [newer, other]
    directory.withdraw(other)
    assert await registry.workers() == [newer]
    await registry.close()


def test_applications_do_not_see_each_other(store: FakeStore) -> None:
    RayDirectory("one").announce(RECORD)
    assert RayDirectory("two").members() == []


def test_who_says_nothing_is_forgotten(store: FakeStore) -> None:
    now = [1_000.0]
    directory = RayDirectory("app", lambda: now[0])
    directory.announce(RECORD)
    now[0] += FORGET_S
    assert directory.members() == [RECORD]
    now[0] += 1
    assert directory.members() == []


def test_an_entry_that_cannot_be_read_is_skipped(store: FakeStore) -> None:
    RayDirectory("app").announce(RECORD)
    store.values[b"worker:app:newer"] = b'{"unix_time": "tomorrow"}'
    assert RayDirectory("app").members() == [RECORD]


async def test_trouble_with_ray_is_nobodys_trouble(store: FakeStore) -> None:
    inner = memory()
    await inner.register(RECORD, Load())
    store.trouble = RuntimeError("the head node is away")
    registry = RegistryWithRay(inner, RayDirectory("app"))
    assert await registry.workers() == [RECORD]


async def test_a_stuck_lookup_is_not_waited_for_and_holds_one_thread(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_LOOKUP_TIMEOUT_S", 0.01)
    go_on = threading.Event()
    calls: list[int] = []

    class Stuck:
        def members(self) -> list[WorkerRecord]:
            calls.append(1)
            go_on.wait(10)
            return [RECORD]

    registry = RegistryWithRay(memory(), cast(RayDirectory, Stuck()))
    assert await registry.workers() == []
    assert await registry.workers() == []
    assert len(calls) == 1
    go_on.set()
    monkeypatch.setattr(discovery, "_LOOKUP_TIMEOUT_S", 10.0)
    assert await registry.workers() == [RECORD]


async def test_announced_until_cancelled_then_withdrawn(store: FakeStore) -> None:
    announced = asyncio.Event()
    loop = asyncio.get_running_loop()
    directory = RayDirectory("app", lambda: loop.call_soon_threadsafe(announced.set) and 0.0)
    task = asyncio.create_task(keep_announced(directory, RECORD))
    await announced.wait()
    task.cancel()
    await asyncio.wait([task])
    assert store.values == {}
