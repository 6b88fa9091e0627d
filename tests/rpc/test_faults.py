"""Attach streams with fault rules, each end alone: what passes, what breaks, and what stays broken."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest

from kvrelay.core.faults import Faults, parse_rules
from kvrelay.pb import worker_pb2 as pb
from kvrelay.rpc.attach import StreamBroken
from kvrelay.rpc.faults import FaultyRouterEnd, FaultyWorkerEnd, faulty_dial
from tests.support.virtual_time import run_virtual

WELCOME = pb.WorkerMessage(welcome=pb.Welcome(worker_id="decode-0"))
BEAT = pb.WorkerMessage(beat=pb.Load())
COMMITTED = pb.WorkerMessage(events=pb.Events(events=[pb.Event(request_id="r1", committed=pb.Committed())]))
START = pb.RouterMessage(start=pb.Start(request_id="r1"))
CANCEL = pb.RouterMessage(cancel=pb.Cancel(request_id="r1"))


class Wire:
    """Either end of a stream, without the other: `said` is what it reads."""

    def __init__(self, *said: Any) -> None:
        self.said = deque(said)
        self.written: list[Any] = []
        self.is_closed = False

    async def read(self) -> Any:
        if not self.said:
            raise StreamBroken("over")
        return self.said.popleft()

    async def write(self, message: Any) -> None:
        self.written.append(message)

    async def close(self) -> None:
        self.is_closed = True


def rule(at: str, do: str, **match: str | int) -> Faults:
    return Faults(parse_rules([{"at": at, "do": do, "match": match, "seconds": 2, "times": 1}]))


@pytest.mark.parametrize(
    ("do", "written"),
    [("drop", [CANCEL]), ("duplicate", [START, START, CANCEL]), ("half_open", []), ("delay", [START, CANCEL])],
)
def test_what_a_router_writes(do: str, written: list[pb.RouterMessage]) -> None:
    async def story() -> None:
        wire, began = Wire(), asyncio.get_running_loop().time()
        end = FaultyRouterEnd(wire, rule("link.up", do, message="start"))
        for message in (START, CANCEL):
            await end.write(message)
        assert wire.written == written
        assert asyncio.get_running_loop().time() - began == (2.0 if do == "delay" else 0.0)

    run_virtual(story())


@pytest.mark.parametrize("do", ["cut", "truncate", "corrupt"])
def test_a_stream_that_is_cut_is_over_for_its_router(do: str) -> None:
    async def story() -> None:
        wire = Wire()
        with pytest.raises(StreamBroken):
            await FaultyRouterEnd(wire, rule("link.up", do)).write(START)
        assert wire.is_closed
        assert wire.written == []

    run_virtual(story())


def test_a_stalled_write_waits_for_ever() -> None:
    async def story() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await FaultyRouterEnd(Wire(), rule("link.up", "stall")).write(START)

    run_virtual(story())


def test_a_router_reads_what_its_worker_was_named_for() -> None:
    async def story() -> None:
        faults = rule("link.down", "drop", worker="decode-0", side="reader", event="committed")
        end = FaultyRouterEnd(Wire(WELCOME, COMMITTED, BEAT, COMMITTED), faults)
        assert [await end.read() for _ in range(3)] == [WELCOME, BEAT, COMMITTED]
        other = rule("link.down", "drop", worker="decode-1", side="reader", event="committed")
        end = FaultyRouterEnd(Wire(WELCOME, COMMITTED), other)
        assert [await end.read() for _ in range(2)] == [WELCOME, COMMITTED]

    run_virtual(story())


def test_a_rule_strikes_once_although_both_ends_hold_it() -> None:
    async def story() -> None:
        faults = rule("link.down", "duplicate", event="committed")
        worker_wire = Wire()
        worker = FaultyWorkerEnd(worker_wire, faults, "decode-0")
        await worker.write(COMMITTED)
        assert worker_wire.written == [COMMITTED, COMMITTED]
        faults = rule("link.down", "duplicate", event="committed")
        router = FaultyRouterEnd(Wire(COMMITTED, BEAT), faults)
        assert [await router.read(), await router.read()] == [COMMITTED, BEAT]

    run_virtual(story())


def test_a_worker_reads_through_the_rules_and_sees_a_good_end() -> None:
    async def story() -> None:
        end = FaultyWorkerEnd(Wire(START, CANCEL, None), rule("link.up", "drop", side="reader", nth=1), "decode-0")
        assert await end.read() == CANCEL
        assert await end.read() is None
        with pytest.raises(StreamBroken):
            await FaultyWorkerEnd(Wire(START), rule("link.up", "cut", side="reader"), "decode-0").read()

    run_virtual(story())


def test_a_kill_asks_once() -> None:
    async def story() -> None:
        kills: list[bool] = []
        faults = Faults(
            parse_rules([{"at": "link.down", "do": "kill", "match": {"event": "committed"}}]),
            on_kill=lambda: kills.append(True),
        )
        wire = Wire()
        end = FaultyWorkerEnd(wire, faults, "decode-0")
        await end.write(BEAT)
        await end.write(COMMITTED)
        assert kills == [True]
        assert wire.written == [BEAT]

    run_virtual(story())


def test_without_rules_nothing_stands_at_the_seam() -> None:
    def dial(address: str) -> Wire:
        return Wire()

    assert faulty_dial(dial, None) is dial
    assert isinstance(faulty_dial(dial, Faults())("nowhere:1"), FaultyRouterEnd)
