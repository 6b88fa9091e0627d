"""A registry with fault rules: the breaker in front of it makes of them what it makes of Redis's own trouble."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.core.config import PlacementSettings
from kvrelay.core.faults import Faults, parse_rules
from kvrelay.placement.memory import MemoryRegistry
from kvrelay.placement.open import open_registry
from kvrelay.placement.registry import EventKind, Registry
from tests.placement.builders import load, worker
from tests.support.virtual_time import VirtualTimeLoop, run_virtual

SETTINGS = PlacementSettings()


def registry_with(*rules: dict[str, object], kills: list[bool] | None = None) -> tuple[Registry, Faults]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    faults = Faults(parse_rules(list(rules)), on_kill=lambda: (kills if kills is not None else []).append(True))
    return open_registry(SETTINGS, loop, faults=faults), faults


@pytest.mark.parametrize("do", ["stall", "drop", "cut"])
def test_a_lost_call_is_answered_by_the_fallback_in_time(do: str) -> None:
    async def story() -> None:
        registry, faults = registry_with({"at": "registry", "match": {"call": "workers"}, "do": do, "times": 1})
        await registry.register(worker("p0"), load())
        began = asyncio.get_running_loop().time()
        assert await registry.workers() == []
        assert asyncio.get_running_loop().time() - began <= SETTINGS.call_timeout_s
        assert await registry.workers() == [worker("p0")]
        assert faults.num_done == 1
        await registry.close()

    run_virtual(story())


@pytest.mark.parametrize("do", ["delay", "duplicate"])
def test_a_call_that_is_late_or_made_twice_is_made(do: str) -> None:
    async def story() -> None:
        late_s, began = SETTINGS.call_timeout_s / 2, asyncio.get_running_loop().time()
        registry, faults = registry_with({"at": "registry", "do": do, "seconds": late_s})
        await registry.register(worker("p0"), load())
        assert asyncio.get_running_loop().time() - began == (late_s if do == "delay" else 0.0)
        assert await registry.workers() == [worker("p0")]
        assert faults.num_done == 2
        await registry.close()

    run_virtual(story())


@pytest.mark.parametrize(("do", "seen"), [("cut", 1), ("duplicate", 3), ("delay", 2)])
def test_events_are_lost_repeated_or_late(do: str, seen: int) -> None:
    async def story() -> None:
        registry, _ = registry_with(
            {"at": "registry", "match": {"call": "events"}, "do": do, "times": 1, "seconds": 1}
        )
        found: asyncio.Queue[EventKind] = asyncio.Queue()

        async def listen() -> None:
            async for event in registry.events():
                found.put_nowait(event.kind)

        listening = asyncio.create_task(listen())
        await asyncio.sleep(1)
        await registry.register(worker("p0"), load())
        await registry.register(worker("p1"), load())
        await asyncio.sleep(5)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        assert found.qsize() == seen
        await registry.close()

    run_virtual(story())


def test_a_kill_asks() -> None:
    async def story() -> None:
        kills: list[bool] = []
        registry, _ = registry_with({"at": "registry", "match": {"call": "renew"}, "do": "kill"}, kills=kills)
        await registry.register(worker("p0"), load())
        assert kills == []
        await registry.renew(worker("p0"), load())
        assert kills == [True]
        await registry.close()

    run_virtual(story())


def test_without_rules_nothing_stands_at_the_seam() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        assert type(open_registry(SETTINGS, loop)) is MemoryRegistry

    run_virtual(story())
