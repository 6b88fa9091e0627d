"""A worker that has failed says why, once, at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvrelay.worker.supervisor import Supervisor, watch_engine
from tests.support.virtual_time import run_virtual


class FakeVitals:
    def __init__(self) -> None:
        self.is_alive = True
        self.age = 0.0

    def age_ms(self) -> float:
        return self.age


def supervised(work: Callable[[], Awaitable[None]], restart_s: float | None = None) -> list[str]:
    failures: list[str] = []

    async def story() -> None:
        supervisor = Supervisor(failures.append)
        supervisor.run("the task", work, restart_s=restart_s)
        try:
            async with asyncio.timeout(3600.0):
                await supervisor.wait()
        except TimeoutError:
            pass
        assert supervisor.reason == (failures[0] if failures else "")
        await supervisor.stop()

    run_virtual(story())
    return failures


def test_a_task_that_raises_is_the_end() -> None:
    async def work() -> None:
        raise ValueError("no such block")

    assert supervised(work) == ["the task: no such block"]


def test_a_vital_task_that_returns_is_the_end_too() -> None:
    async def work() -> None:
        await asyncio.sleep(5.0)

    assert supervised(work) == ["the task: it ended"]


def test_a_restarted_task_is_no_reason_to_die() -> None:
    begun: list[float] = []

    async def work() -> None:
        begun.append(asyncio.get_running_loop().time())
        raise OSError("the registry is away")

    assert supervised(work, restart_s=600.0) == []
    assert [at - begun[0] for at in begun] == [600.0 * turn for turn in range(len(begun))]
    assert len(begun) >= 6


def test_a_dead_engine_is_noticed() -> None:
    vitals = FakeVitals()
    vitals.is_alive = False
    failures = supervised(lambda: watch_engine(vitals, max_step_ms=100.0, every_s=0.25))
    assert failures == ["the task: the engine thread has ended"]


def test_a_stuck_step_is_noticed_and_named() -> None:
    vitals = FakeVitals()

    async def story() -> None:
        failures: list[str] = []
        supervisor = Supervisor(failures.append)
        supervisor.run("engine", lambda: watch_engine(vitals, max_step_ms=100.0, every_s=0.25))
        await asyncio.sleep(10.0)
        assert failures == []
        vitals.age = 101.0
        await supervisor.wait()
        assert failures == ["engine: a step has been running for 101 ms, more than max_step_ms = 100"]
        supervisor.fail("something later")
        assert len(failures) == 1
        await supervisor.stop()

    run_virtual(story())


def test_the_owner_learns_of_the_failure_whatever_telling_the_others_does() -> None:
    def tell(reason: str) -> None:
        raise RuntimeError("a stream that could not be told")

    async def story() -> None:
        supervisor = Supervisor(tell)
        with pytest.raises(RuntimeError):
            supervisor.fail("the engine died")
        await supervisor.wait()
        assert supervisor.reason == "the engine died"

    run_virtual(story())
