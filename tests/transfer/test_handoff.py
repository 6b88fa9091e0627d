"""Stories of whole handoffs: both halves over the loopback pipe, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvrelay.core.ids import BlockId, Incarnation, TransferId
from kvrelay.transfer.reception import LANDED_TIMEOUT_S
from tests.support.virtual_time import run_virtual
from tests.transfer.world import (
    IDENTITY,
    SETTINGS,
    SHARD,
    T1,
    TOKENS,
    World,
    commit,
    outgoing,
    receiver_of,
    soon,
    story,
    worker,
)


@story
async def test_a_sequence_arrives_whole_with_its_partial_last_block() -> None:
    world = World()
    world.reserve([9, 4, 6])
    world.send([1, 2, 3])
    world.p_desk.finish(T1, commit(10))
    await soon()
    world.assert_copied([1, 2, 3], [9, 4, 6])
    (landed,) = world.d.inbox.commits[T1]
    assert (landed.num_tokens, landed.num_slabs, landed.choices) == (10, 1, TOKENS)
    assert world.d.inbox.push_errors == {T1: [""]}
    assert world.p.inbox.send_errors == {T1: [""]}
    world.assert_empty()


@story
async def test_blocks_leave_while_later_chunks_are_computed() -> None:
    world = World()
    world.reserve([9, 4, 6])
    world.send([1, 2, 3])
    world.p_desk.progress(T1, 7)
    await soon()
    world.assert_copied([1], [9])
    assert world.d.kv.is_poisoned(BlockId(4))
    world.p_desk.progress(T1, 3)  # never backwards
    world.p_desk.progress(T1, 8)
    await soon()
    world.assert_copied([1, 2], [9, 4])
    assert world.d.kv.is_poisoned(BlockId(6))
    world.p_desk.finish(T1, commit(9))
    await soon()
    world.assert_copied([1, 2, 3], [9, 4, 6])
    world.assert_empty()


@story
async def test_only_what_the_receiver_lacks_travels() -> None:
    world = World()
    world.reserve([6], first_block=2)
    world.send([1, 2, 3], first_block=2)
    world.p_desk.finish(T1, commit(12))
    await soon()
    world.assert_copied([3], [6])
    assert world.d.kv.num_writes == 1
    world.assert_empty()


@story
async def test_a_sequence_that_the_receiver_has_already_is_only_committed() -> None:
    world = World()
    world.reserve([], first_block=2)
    world.send([1, 2], first_block=2)
    world.p_desk.finish(T1, commit(8))
    await soon()
    assert world.d.kv.num_writes == 0
    assert world.d.inbox.push_errors == {T1: [""]}
    world.assert_empty()


@story
async def test_heartbeats_keep_a_slow_prefill_alive() -> None:
    world = World()
    world.reserve([9])
    world.send([1])
    await asyncio.sleep(20 * SETTINGS.stall_s)
    assert not world.d_desk.is_empty
    world.p_desk.finish(T1, commit(4))
    await soon()
    assert world.d.inbox.push_errors == {T1: [""]}
    world.assert_empty()


@story
async def test_hnd_01_nothing_is_written_after_a_close_in_mid_push() -> None:
    world = World()
    world.reserve([9, 4])
    world.send([1, 2])
    world.p_desk.progress(T1, 4)
    await soon()
    world.d_desk.close(T1)
    world.p_desk.progress(T1, 8)
    await soon()
    assert world.d.kv.is_poisoned(BlockId(4))
    assert world.d.inbox.push_errors == {T1: ["closed by the receiving engine"]}
    assert world.p.inbox.send_errors == {T1: ["closed by the receiving engine"]}
    assert world.d.inbox.commits == {}
    world.assert_empty()


@story
async def test_a_close_before_the_push_ends_at_once_and_refuses_the_push() -> None:
    world = World()
    world.reserve([9])
    world.d_desk.close(T1)
    assert world.d.inbox.push_errors == {T1: ["closed by the receiving engine"]}
    world.send([1])
    await soon()
    assert world.p.inbox.send_errors == {T1: ["transfer t1 has ended already"]}
    world.d_desk.close(T1)
    world.assert_empty()


@story
async def test_an_abort_leaves_without_a_commit() -> None:
    world = World()
    world.reserve([9, 4])
    world.send([1, 2])
    world.p_desk.progress(T1, 4)
    await soon()
    world.p_desk.abort_send(T1)
    await soon()
    assert world.p.inbox.send_errors == {T1: ["aborted by the sending engine"]}
    assert world.d.inbox.push_errors == {T1: ["the Push broke off before its commit"]}
    world.p_desk.abort_send(T1)
    world.p_desk.progress(T1, 8)
    world.p_desk.finish(T1, commit(8))
    await soon()
    world.assert_empty()


@story
async def test_an_abort_before_the_first_step_still_ends_the_send() -> None:
    world = World()
    world.send([1])
    world.p_desk.abort_send(T1)
    await soon()
    assert world.p.inbox.send_errors == {T1: ["aborted by the sending engine"]}
    world.assert_empty()


@story
async def test_an_engine_that_has_given_up_refuses_the_commit() -> None:
    world = World()
    world.d.inbox.answer = False
    world.reserve([9])
    world.send([1])
    world.p_desk.finish(T1, commit(4))
    await soon()
    reason = "the receiving engine has given this request up"
    assert world.d.inbox.push_errors == {T1: [reason]}
    assert world.p.inbox.send_errors == {T1: [reason]}
    world.assert_empty()


@story
async def test_a_close_between_landing_and_reply_wins() -> None:
    world = World()
    world.d.inbox.answer = None
    world.reserve([9])
    world.send([1])
    world.p_desk.finish(T1, commit(4))
    await soon()
    world.d_desk.close(T1)
    world.d.inbox.reply(T1, False)
    await soon()
    assert world.d.inbox.push_errors == {T1: ["closed by the receiving engine"]}
    world.assert_empty()


@story
async def test_an_engine_that_does_not_answer_costs_the_transfer_not_the_sender() -> None:
    world = World()
    world.d.inbox.answer = None
    world.reserve([9])
    world.send([1])
    world.p_desk.finish(T1, commit(4))
    await asyncio.sleep(LANDED_TIMEOUT_S - 1)
    assert not world.p_desk.is_empty
    await asyncio.sleep(1.1)
    assert "did not answer within 30 s" in world.p.inbox.send_errors[T1][0]
    world.d.inbox.reply(T1, True)
    await soon()
    world.assert_empty()


@story
async def test_a_sender_that_leaves_after_the_commit_changes_nothing_for_the_receiver() -> None:
    world = World()
    world.d.inbox.answer = None
    world.reserve([9])
    world.send([1])
    world.p_desk.finish(T1, commit(4))
    await soon()
    world.p_desk.abort_send(T1)
    await soon()
    assert not world.d_desk.is_empty
    world.d.inbox.reply(T1, True)
    await soon()
    assert world.d.inbox.push_errors == {T1: [""]}
    world.assert_empty()


@story
async def test_a_restarted_receiver_is_another_process() -> None:
    world = World()
    world.reserve([9])
    world.send([1], receiver=replace(world.receiver, incarnation=Incarnation("d-0")))
    await soon()
    assert world.p.inbox.send_errors == {T1: ["incarnation: this is d-1 != pushed to d-0"]}
    assert not world.d_desk.is_empty  # the reservation waits for its own Push
    world.d_desk.close(T1)
    world.assert_empty()


@story
async def test_dtypes_that_differ_are_converted() -> None:
    half = replace(SHARD, dtype="float16")
    world = World(d=worker("d", shard=half))
    world.reserve([9])
    world.send([1])
    world.p.kv.fill(BlockId(1), bytes.fromhex("0000c03f"))  # 1.5 in float32
    world.p_desk.finish(T1, commit(4))
    await soon()
    assert world.d.kv.block(BlockId(9)) == bytes.fromhex("003e") * (world.d.kv.block_bytes // 2)
    world.assert_empty()


@story
async def test_two_receiving_shards_commit_together() -> None:
    """P holds both heads; D1 and D2 hold one each."""
    world = World(d=worker("d", shard=replace(SHARD, head_end=1)))
    other = World(d=worker("e", shard=replace(SHARD, head_begin=1)))
    world.pipe.listen("e", other.d_desk.receive)
    world.reserve([9])
    other.reserve([8])
    world.p.kv.fill(BlockId(1), bytes(range(256)))
    receivers = [world.receiver, receiver_of(other.d.home, "e")]
    push = outgoing([1], receivers)
    world.read[T1] = push.blocks
    world.p_desk.send(push)
    world.p_desk.finish(T1, commit(4))
    await soon()
    assert world.p.inbox.send_errors == {T1: [""]}
    rows = [world.p.kv.block(BlockId(1))[at : at + 128] for at in range(0, world.p.kv.block_bytes, 128)]
    assert world.d.kv.block(BlockId(9)) == b"".join(row[:64] for row in rows)
    assert other.d.kv.block(BlockId(8)) == b"".join(row[64:] for row in rows)
    world.assert_empty()
    other.assert_empty()


@story
async def test_no_more_than_max_open_reservations() -> None:
    world = World()
    for number in range(SETTINGS.max_open):
        world.reserve([], transfer_id=TransferId(f"n{number}"))
    world.reserve([], transfer_id=T1)
    assert world.d.inbox.push_errors == {T1: ["256 transfers are open already"]}
    await world.d_desk.stop()
    assert world.d_desk.is_empty
    assert len(world.d.inbox.push_errors) == SETTINGS.max_open + 1


@story
async def test_stopping_ends_everything_and_what_comes_after() -> None:
    world = World()
    t2, t3 = TransferId("t2"), TransferId("t3")
    world.reserve([9])
    world.reserve([4], transfer_id=t2)
    world.send([1])
    await soon()
    await world.p_desk.stop()
    await world.d_desk.stop()
    world.reserve([5], transfer_id=t3)
    world.send([2], transfer_id=t3)
    await soon()
    assert set(world.d.inbox.push_errors) == {T1, t2, t3}
    assert set(world.p.inbox.send_errors) == {T1, t3}
    world.assert_empty()


@pytest.mark.parametrize("field", ["model", "rope", "tokenizer", "num_layers", "num_kv_heads", "head_dim", "block_size",
                                   "protocol"])  # fmt: skip
def test_hnd_06_a_difference_in_identity_is_refused_with_both_values(field: str) -> None:
    async def tell() -> None:
        ours = getattr(IDENTITY, field)
        theirs = "other" if isinstance(ours, str) else 99
        p = worker("p")
        p = replace(p, home=replace(p.home, identity=replace(IDENTITY, **{field: theirs})))
        world = World(p=p)
        world.reserve([9])
        world.send([1])
        await soon()
        (error,) = world.p.inbox.send_errors[T1]
        assert f"{field}: {ours} != {theirs}" in error
        assert world.d.inbox.push_errors == {T1: [error]}
        assert world.d.kv.num_writes == 0
        world.assert_empty()

    run_virtual(tell())
