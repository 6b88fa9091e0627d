"""Pushes through a pipe with fault rules: each ends once on both sides, and nothing wrong lands."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.core.faults import Faults, parse_rules
from kvrelay.transfer.faults import FaultyPipe, faulty_accept
from tests.support.virtual_time import run_virtual
from tests.transfer.world import T1, World, commit

UNHARMED = [("open", "delay"), ("slab", "delay"), ("commit", "duplicate")]


async def push(seam: str, frame: str, action: str) -> World:
    faults = Faults(parse_rules([{"at": seam, "match": {"frame": frame}, "do": action, "seconds": 2}]))
    at_sender = seam == "pipe.send"
    world = World(wrap=lambda pipe: FaultyPipe(pipe, faults) if at_sender else pipe)
    if not at_sender:
        world.pipe.listen("d", faulty_accept(world.d_desk.receive, faults))
    world.reserve([4, 5])
    world.send([1, 2])
    world.p_desk.finish(T1, commit(8))
    await asyncio.sleep(60)
    world.d_desk.close(T1)  # as the engine does; a Push without its opening ends nobody's reservation
    world.assert_empty()
    assert faults.num_done > 0
    return world


@pytest.mark.parametrize("seam", ["pipe.send", "pipe.receive"])
@pytest.mark.parametrize("frame", ["open", "slab", "commit"])
@pytest.mark.parametrize("action", ["drop", "corrupt", "truncate", "stall", "half_open", "cut"])
def test_a_push_that_met_harm_never_lands(seam: str, frame: str, action: str) -> None:
    world = run_virtual(push(seam, frame, action))
    assert world.d.inbox.commits == {}
    assert world.d.inbox.push_errors[T1] != [""]


@pytest.mark.parametrize(("frame", "action"), UNHARMED)
def test_a_push_that_was_only_late_lands(frame: str, action: str) -> None:
    world = run_virtual(push("pipe.receive", frame, action))
    assert world.d.inbox.push_errors == {T1: [""]}
    world.assert_copied([1, 2], [4, 5])
