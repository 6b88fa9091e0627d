"""Stories of the sender: receivers that are not there, do not listen, do not answer, or do not fit."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from kvrelay.core.handoff import Handoff, KvShard
from kvrelay.transfer.pipes import FrameStream
from kvrelay.transfer.push_leg import ANSWER_TIMEOUT_S
from kvrelay.transfer.words import PushAnswer
from tests.transfer.world import SETTINGS, T1, World, commit, outgoing, soon, story, worker


@story
async def test_nobody_at_the_address() -> None:
    world = World()
    world.pipe.leave("d")
    world.send([1])
    await soon()
    assert world.p.inbox.send_errors == {T1: ["lost d: connection refused"]}
    world.assert_empty()


@story
async def test_a_receiver_that_takes_no_data_is_given_up() -> None:
    async def deaf(stream: FrameStream) -> PushAnswer:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    world = World()
    world.pipe.listen("d", deaf)
    world.send([1, 2, 3, 4])
    for done in range(1, 5):
        world.p_desk.progress(T1, 4 * done)
        await soon()
    await asyncio.sleep(SETTINGS.stall_s + 1)
    assert world.p.inbox.send_errors == {T1: ["d took no data for 5 s"]}
    world.assert_empty()


@story
async def test_a_receiver_that_never_answers_the_commit_is_given_up() -> None:
    async def mute(stream: FrameStream) -> PushAnswer:
        while await stream.read():
            pass
        raise AssertionError

    world = World()
    world.pipe.listen("d", mute)
    world.send([1])
    world.p_desk.finish(T1, commit(4))
    await asyncio.sleep(ANSWER_TIMEOUT_S + 1)
    assert "did not answer the commit" in world.p.inbox.send_errors[T1][0]
    world.assert_empty()


@story
async def test_an_answer_before_the_commit_is_no_commit() -> None:
    async def hasty(stream: FrameStream) -> PushAnswer:
        await stream.read()
        return PushAnswer(True)

    world = World()
    world.pipe.listen("d", hasty)
    world.send([1])
    await soon()
    assert world.p.inbox.send_errors == {T1: ["the receiver answered before the commit"]}
    world.assert_empty()


@story
async def test_a_sender_without_the_receivers_layers_does_not_begin() -> None:
    world = World(p=worker("p", shard=KvShard(0, 2, 0, 2, "float32")))
    world.reserve([9])
    world.send([1])
    await soon()
    assert "does not contain the receiver's" in world.p.inbox.send_errors[T1][0]
    world.d_desk.close(T1)
    world.assert_empty()


@story
async def test_a_handoff_to_nobody_fails() -> None:
    world = World()
    world.read[T1] = ()
    world.p_desk.send(replace(outgoing([], []), handoff=Handoff(T1, (), 0)))
    await soon()
    assert world.p.inbox.send_errors == {T1: ["the handoff names no receiver"]}
    world.assert_empty()
