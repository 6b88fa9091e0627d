"""Stories of the receiver: what it makes of frames that no honest sender would send like this."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvrelay.core.handoff import Commit, Slab
from kvrelay.core.ids import Attempt, BlockId, Incarnation, RequestId, TransferId
from kvrelay.rpc.frames import Frame, Heartbeat
from kvrelay.transfer import receiving
from kvrelay.transfer.frames import checksum
from kvrelay.transfer.words import PushAnswer
from tests.support.virtual_time import run_virtual
from tests.transfer.world import SHARD, T1, Script, World, recorded_push, slabs_of, with_opening

Frames = list[Frame]


def with_slab(frames: Frames, seq_no: int, **changes: object) -> Frames:
    changed = [replace(slab, **changes) if slab.seq_no == seq_no else slab for slab in slabs_of(frames)]  # type: ignore[arg-type]
    return [frames[0], *changed, frames[-1]]


def flipped(frames: Frames) -> Frames:
    payload = bytearray(slabs_of(frames)[1].payload)
    payload[100] ^= 1
    return with_slab(frames, 1, payload=bytes(payload))


def short(frames: Frames) -> Frames:
    payload = slabs_of(frames)[1].payload[:-256]
    return with_slab(frames, 1, payload=payload, checksum=checksum(payload))


def with_commit(frames: Frames, **changes: int) -> Frames:
    last = frames[-1]
    assert isinstance(last, Commit)
    return [*frames[:-1], replace(last, **changes)]


def twice(frames: Frames) -> Frames:
    again = replace(slabs_of(frames)[0], seq_no=1)
    return [frames[0], slabs_of(frames)[0], again, frames[-1]]


FAULTS: dict[str, tuple[Callable[[Frames], Frames], str]] = {
    "corrupt": (flipped, "slab 1 is corrupt: checksum"),
    "short": (short, "slab 1 has 512 bytes, expected 768"),
    "duplicate": (lambda frames: [*frames[:2], *frames[1:]], "slab out of order: expected 1, got 0"),
    "same content again": (twice, "block 0 arrived twice"),
    "swapped": (lambda frames: [frames[0], frames[2], frames[1], *frames[3:]], "expected 0, got 1"),
    "lost in the middle": (lambda frames: [*frames[:2], *frames[3:]], "expected 1, got 2"),
    "lost at the end": (lambda frames: [*frames[:-2], frames[-1]], "slabs: received 2 != sent 3"),
    "lost and not counted": (
        lambda frames: with_commit([*frames[:-2], frames[-1]], num_slabs=2),
        "1 of 3 blocks are incomplete",
    ),
    "outside": (lambda frames: with_slab(frames, 1, first_block=3), "is outside of blocks"),
    "too many tokens": (lambda frames: with_commit(frames, num_tokens=13), "commit of 13 tokens into blocks for 12"),
    "opened twice": (lambda frames: [frames[0], *frames], "opened twice"),
    "ends without commit": (lambda frames: frames[:-1], "ended without a commit"),
    "other blocks": (lambda frames: with_opening(frames, num_blocks=2), r"expected \(0, 3\) != pushed \(0, 2\)"),
    "other first block": (lambda frames: with_opening(frames, first_block=1), r"\(0, 3\) != pushed \(1, 3\)"),
    "other checksum": (lambda frames: with_opening(frames, checksum="crc"), "checksum: xxh3 != crc"),
    "other order": (lambda frames: with_opening(frames, shard=replace(SHARD, order="kT")), "plain != kT"),
    "other layers": (
        lambda frames: with_opening(frames, shard=replace(SHARD, layer_end=2)),
        "layer_end=3.*not within.*layer_end=2",
    ),
    "other dtype": (lambda frames: with_opening(frames, shard=replace(SHARD, dtype="int3")), "'int3' is none of"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_push_fails_closed(fault: str) -> None:
    spoil, reason = FAULTS[fault]

    async def tell() -> None:
        world = World()
        world.reserve([9, 4, 6])
        answer = await world.d_desk.receive(Script(spoil(await recorded_push([1, 2, 3]))))
        assert not answer.committed
        assert re.search(reason, answer.error)
        assert world.d.inbox.push_errors == {T1: [answer.error]}
        assert world.d.inbox.commits == {}
        world.assert_empty()

    run_virtual(tell())


STALE: dict[str, tuple[dict[str, object], str]] = {
    "unknown id": ({"transfer_id": TransferId("t9")}, "transfer t9 is unknown here"),
    "older attempt": ({"attempt": Attempt(7)}, "stale key: transfer t1 is for r@0 != r@7"),
    "other request": ({"request_id": RequestId("q")}, "r@0 != q@0"),
    "other incarnation": ({"receiver_incarnation": Incarnation("d-0")}, "incarnation: this is d-1 != pushed to d-0"),
}


@pytest.mark.parametrize("key", STALE)
def test_a_stale_key_is_dropped_and_the_reservation_waits_on(key: str) -> None:
    changes, reason = STALE[key]

    async def tell() -> None:
        world = World()
        world.reserve([9, 4, 6])
        frames = await recorded_push([1, 2, 3])
        answer = await world.d_desk.receive(Script(with_opening(frames, **changes)))
        assert answer == PushAnswer(False, answer.error, retryable=False)
        assert reason in answer.error
        assert world.d.inbox.push_errors == {}
        assert (await world.d_desk.receive(Script(frames))).committed
        world.assert_empty()

    run_virtual(tell())


def test_a_transfer_id_accepts_one_push_ever() -> None:
    async def tell() -> None:
        world = World()
        frames = await recorded_push([1, 2, 3])
        world.reserve([9, 4, 6])
        first = asyncio.ensure_future(world.d_desk.receive(Script(frames[:2], then_silence=True)))
        await asyncio.sleep(0.1)
        second = await world.d_desk.receive(Script(frames))
        assert second.error == "transfer t1 accepts one Push, and has had it"
        assert world.d.inbox.push_errors == {}
        first.cancel()
        await asyncio.wait({first})
        third = await world.d_desk.receive(Script(frames))
        assert third.error == "transfer t1 has ended already"
        assert world.d.kv.is_poisoned(BlockId(4))
        world.assert_empty()

    run_virtual(tell())


def test_an_id_is_not_reserved_twice() -> None:
    async def tell() -> None:
        world = World()
        world.reserve([9, 4, 6])
        world.reserve([9, 4, 6])
        assert world.d.inbox.push_errors == {}
        assert (await world.d_desk.receive(Script(await recorded_push([1, 2, 3])))).committed
        world.reserve([9, 4, 6])
        assert world.d.inbox.push_errors == {T1: ["", "this transfer id was used before"]}
        assert world.d_desk.is_empty

    run_virtual(tell())


@pytest.mark.parametrize("count", [0, 1, 3])
def test_silence_is_a_stall(count: int) -> None:
    async def tell() -> None:
        world = World()
        world.reserve([9, 4, 6])
        frames = (await recorded_push([1, 2, 3]))[:count]
        answer = await world.d_desk.receive(Script(frames, then_silence=True))
        assert answer.error == "stalled: no frame for 5 s"
        assert world.d.inbox.push_errors == ({T1: [answer.error]} if count else {})
        world.d_desk.close(T1)
        world.assert_empty()

    run_virtual(tell())


def test_frames_behind_the_commit_are_never_read() -> None:
    async def tell() -> None:
        world = World()
        world.reserve([9, 4, 6])
        frames = await recorded_push([1, 2, 3])
        answer = await world.d_desk.receive(Script([*frames, frames[-1], frames[1]]))
        assert answer.committed
        assert len(world.d.inbox.commits[T1]) == 1
        assert world.d.kv.num_writes == 3
        world.assert_empty()

    run_virtual(tell())


def test_a_push_begins_with_open() -> None:
    async def tell() -> None:
        world = World()
        for frame in (Heartbeat(), (await recorded_push([1]))[1]):
            answer = await world.d_desk.receive(Script([frame]))
            assert "begins with Open" in answer.error
        assert (await world.d_desk.receive(Script([]))).error == "the Push ended without a commit"

    run_virtual(tell())


def test_only_so_many_ended_ids_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "MAX_REMEMBERED", 2)

    async def tell() -> None:
        world = World()
        for name in ("a", "b", "c"):
            world.reserve([], transfer_id=TransferId(name))
            world.d_desk.close(TransferId(name))
        frames = await recorded_push([1])
        for name, known in (("a", "is unknown here"), ("b", "has ended already"), ("c", "has ended already")):
            answer = await world.d_desk.receive(Script(with_opening(frames, transfer_id=TransferId(name))))
            assert known in answer.error

    run_virtual(tell())


def test_a_pool_that_fails_ends_the_push() -> None:
    async def tell() -> None:
        def broken(*_: object) -> None:
            raise ZeroDivisionError("a bug in the pool")

        world = World()
        world.reserve([9, 4, 6])
        world.d.kv.scatter = broken  # type: ignore[assignment, method-assign]
        with pytest.raises(ZeroDivisionError):
            await world.d_desk.receive(Script(await recorded_push([1, 2, 3])))
        assert world.d.inbox.push_errors == {T1: ["the Push broke off before its commit"]}
        world.assert_empty()

    run_virtual(tell())


def test_a_recorded_push_is_what_the_stories_believe() -> None:
    frames = run_virtual(recorded_push([1, 2, 3]))
    assert [slab.seq_no for slab in slabs_of(frames)] == [0, 1, 2]
    assert isinstance(frames[1], Slab)
    assert isinstance(frames[-1], Commit)
