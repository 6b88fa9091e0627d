"""A running sequence that goes on elsewhere: two engines, and a Push between them that is played by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.core.events import (
    Committed,
    FailReason,
    Finished,
    FinishReason,
    FirstToken,
    Leaving,
    RefuseReason,
    Stayed,
    Token,
    Tokens,
)
from kvrelay.core.handoff import Commit, Handoff
from kvrelay.core.ids import Attempt, Choice, SeqKey, TokenId, TransferId
from kvrelay.core.request import Leg, Migrate, SamplingParams, Start
from kvrelay.engine.fakes import digests
from tests.engine.rig import Rig, prompt

MOVE = TransferId("move")
LONG = SamplingParams(max_tokens=60, temperature=0.0, logprobs=2)
SEEDED = SamplingParams(max_tokens=90, temperature=1.0, seed=7)


class Move:
    """One choice of a start that runs at `source`, on its way to `target`."""

    def __init__(self, source: Rig, start: Start, choice: int = 0) -> None:
        self.source, self.start, self.key = source, start, start.key(Choice(choice))
        self.target = Rig(max_batch_tokens=32)
        self.second = start

    def drain(self) -> None:
        self.source.engine.drain()
        self.steps(1)
        assert Leaving(self.key) in self.source.outbox.events

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.source.engine.step()

    def reserve(self) -> None:
        """At the target, for what the source has said so far."""
        self.second = replace(
            self.source.replay(self.start, self.key.choice, self.said()), leg=Leg.RECEIVE, transfer_id=MOVE
        )
        self.target.engine.submit(self.second)
        self.target.engine.step()

    def said(self) -> list[TokenId]:
        return self.source.output(self.start, self.key.choice)

    def ask(self, num_cached: int = 0) -> None:
        handoff = Handoff(MOVE, (), num_cached)
        self.source.engine.migrate(Migrate(self.key, self.second.attempt, self.second.num_tokens, handoff))

    def level(self) -> None:
        self.source.engine.send_level(MOVE)
        self.steps(1)

    def arrive(self) -> None:
        """What the source has committed lands at the target, its KV checked block by block."""
        outgoing = self.source.transfer.outgoing[MOVE]
        commit = self.source.transfer.commits[MOVE]
        size = self.source.spec.block_size
        for position, digest in enumerate(digests(self.second.token_ids)):
            assert self.source.runner.kv[outgoing.blocks[position // size], position % size] == digest
        replies = self.target.transfer.land(
            self.target.engine, self.target.runner, MOVE, self.second.token_ids, replace(commit, num_slabs=1)
        )
        self.target.engine.step()
        assert replies == [True]
        self.target.transfer.end_push(self.target.engine, MOVE)
        self.source.transfer.end_send(self.source.engine, MOVE)
        self.steps(1)

    def assert_done(self) -> None:
        assert self.source.end(self.start, self.key.choice) == Finished(self.key, FinishReason.HANDED_OFF)
        self.target.run()
        expected = self.source.expected(self.start, self.key.choice)
        assert self.target.output(self.second, self.key.choice) == expected
        assert self.said() == expected[: len(self.said())]
        self.target.assert_empty()


def running(sampling: SamplingParams = LONG, *, tokens: int = 5, length: int = 40) -> Move:
    rig = Rig()
    move = Move(rig, rig.start(prompt(length), sampling))
    move.steps(tokens)
    return move


@pytest.mark.parametrize("sampling", [replace(LONG, max_tokens=90), SEEDED])
@pytest.mark.parametrize("length", [1, 15, 16, 27, 40])
@pytest.mark.parametrize("wait", [0, 1, 20])
def test_a_running_sequence_goes_on_elsewhere(sampling: SamplingParams, length: int, wait: int) -> None:
    move = running(sampling, length=length)
    move.drain()
    move.steps(wait)
    move.reserve()
    move.steps(wait)
    move.ask()
    move.steps(2 + wait)
    move.level()
    frozen = len(move.said())
    move.steps(3)
    assert len(move.said()) == frozen, "it has stopped"
    move.arrive()
    move.assert_done()
    move.source.assert_empty()


def test_the_tokens_since_travel_with_their_logprobs() -> None:
    move = running()
    move.drain()
    move.reserve()
    move.steps(2)
    move.ask()
    move.steps(3)
    move.level()
    move.arrive()
    [committed] = move.target.of(Committed)
    told = {event.first_index: event.tokens for event in move.source.of(Tokens)}
    assert committed.first_index == move.second.next_index
    assert len(committed.tokens) >= 5
    for index, token in enumerate(committed.tokens, committed.first_index):
        assert told[index] == (token,)
    move.assert_done()


def test_only_blocks_that_the_target_lacks_travel() -> None:
    move = running(length=40)
    move.target.start(prompt(40), request="earlier")
    move.target.run()
    move.target.outbox.take()
    move.drain()
    move.reserve()
    move.ask(num_cached=32)
    move.steps(2)
    assert move.source.transfer.outgoing[MOVE].first_block == 2
    assert move.target.transfer.expected[MOVE].first_block == 2
    move.level()
    move.arrive()
    move.assert_done()


def test_choices_leave_one_by_one_while_they_share_a_prompt() -> None:
    rig = Rig()
    start = rig.start(prompt(20), SEEDED, n=2)
    rig.engine.step()
    rig.engine.drain()
    moves = [Move(rig, start, choice) for choice in (0, 1)]
    rig.engine.step()
    for move in moves:
        move.reserve()
        move.ask()
        move.steps(2)
        move.level()
        move.arrive()
        move.assert_done()
    rig.assert_empty()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_push_that_breaks_lets_it_run_on_here(frozen: bool) -> None:
    move = running()
    move.drain()
    move.reserve()
    move.ask()
    move.steps(2)
    if frozen:
        move.level()
    move.source.transfer.end_send(move.source.engine, MOVE, "lost the target")
    move.source.run()
    [stayed] = move.source.of(Stayed)
    assert (stayed.key, stayed.transfer_id, stayed.message) == (move.key, MOVE, "lost the target")
    move.source.assert_right(move.start)
    move.source.assert_empty()


def test_a_second_try_after_the_first_came_to_nothing() -> None:
    move = running()
    move.drain()
    move.reserve()
    move.ask()
    move.steps(2)
    move.level()
    move.source.transfer.end_send(move.source.engine, MOVE, "refused")
    del move.source.transfer.commits[MOVE]
    move.steps(2)
    move.target = Rig()
    move.reserve()
    move.ask()
    move.steps(2)
    move.level()
    move.arrive()
    move.assert_done()
    move.source.assert_empty()


@pytest.mark.parametrize("moment", ["asked", "open", "frozen"])
def test_a_client_that_leaves_on_the_way(moment: str) -> None:
    move = running()
    move.drain()
    move.reserve()
    move.ask()
    if moment != "asked":
        move.steps(2)
    if moment == "frozen":
        move.level()
    move.source.cancel(move.key)
    assert move.source.failure(move.start) is FailReason.CANCELLED
    if moment != "asked":
        assert move.source.transfer.aborted == {MOVE}
        assert move.source.engine.load().num_draining > 0, "the Push may still read"
        move.source.transfer.end_send(move.source.engine, MOVE, "aborted")
        move.steps(1)
    assert move.source.of(Stayed) == []
    move.source.assert_empty()


def test_one_that_ends_on_the_way_ends_here() -> None:
    move = running(replace(LONG, max_tokens=8))
    move.drain()
    move.reserve()
    move.ask()
    move.steps(20)
    assert move.source.end(move.start) == Finished(move.key, FinishReason.LENGTH)
    move.level()
    move.source.transfer.end_send(move.source.engine, MOVE, "aborted")
    move.steps(1)
    move.source.assert_empty()


@pytest.mark.parametrize("fault", ["not leaving", "too few", "too many", "cached", "twice"])
def test_a_migrate_that_cannot_be_done_is_answered(fault: str) -> None:
    move = running()
    if fault != "not leaving":
        move.drain()
    move.reserve()
    num_tokens = {"too few": 3, "too many": 1000}.get(fault, move.second.num_tokens)
    wrong = Migrate(move.key, Attempt(1), num_tokens, Handoff(MOVE, (), 7 if fault == "cached" else 0))
    move.source.engine.migrate(wrong)
    if fault == "twice":
        move.source.engine.migrate(replace(wrong, handoff=Handoff(TransferId("other"), (), 0)))
    move.steps(2)
    assert [event.key for event in move.source.of(Stayed)] == [move.key]
    move.source.run()
    if fault == "twice":
        move.source.transfer.end_send(move.source.engine, MOVE, "aborted")
        move.steps(1)
    move.source.assert_right(move.start)
    move.source.assert_empty()


def test_a_migrate_for_nobody_is_forgotten() -> None:
    move = running()
    gone = Migrate(SeqKey(move.key.request_id, Choice(3), Attempt(0)), Attempt(1), 41, Handoff(MOVE, (), 0))
    move.source.engine.migrate(gone)
    move.source.run()
    assert move.source.of(Stayed) == []


def test_draining_sends_away_what_only_waits_and_takes_nothing_new() -> None:
    rig = Rig(max_num_seqs=1)
    first = rig.start(prompt(20), LONG, request="first")
    rig.engine.step()
    second = rig.start(prompt(20), request="second")
    rig.engine.step()
    rig.engine.drain()
    third = rig.start(prompt(20), request="third")
    rig.run()
    assert rig.failure(second) is FailReason.DRAINING
    assert rig.refusal(third) is RefuseReason.DRAINING
    rig.assert_right(first)
    rig.assert_empty()


def test_a_prompt_is_computed_before_it_leaves_and_a_sender_never_asks() -> None:
    rig = Rig(max_batch_tokens=16)
    local = rig.start(prompt(40), LONG, request="local")
    rig.engine.step()
    rig.engine.drain()
    rig.run()
    assert [type(event) for event in rig.outbox.events[:2]] == [FirstToken, Leaving]
    rig.assert_right(local)

    prefill = Rig(max_batch_tokens=16)
    sends = prefill.start(prompt(40), LONG, leg=Leg.SEND)
    prefill.engine.step()
    prefill.engine.drain()
    prefill.run()
    prefill.end_send(sends)
    assert prefill.end(sends) == Finished(sends.key(Choice(0)), FinishReason.HANDED_OFF)
    assert prefill.of(Leaving) == []
    prefill.assert_empty()


def test_a_reservation_that_lands_while_draining_leaves_at_once() -> None:
    rig = Rig()
    start = rig.start(prompt(20), LONG, leg=Leg.RECEIVE)
    rig.engine.step()
    rig.engine.drain()
    assert rig.land(start, rig.first_tokens(start))
    rig.end_push(start)
    assert rig.of(Leaving) == [Leaving(start.key(Choice(0)))]


def test_a_frozen_sequence_keeps_its_row() -> None:
    rig = Rig(max_num_seqs=1)
    move = Move(rig, rig.start(prompt(20), LONG))
    move.steps(3)
    move.drain()
    move.reserve()
    move.ask()
    move.steps(2)
    move.level()
    assert rig.engine.work.num_rows == 1
    assert rig.engine.load().num_sending == 1
    rig.transfer.end_send(rig.engine, MOVE, "broken")
    rig.run()
    rig.assert_right(move.start)


def test_one_that_grows_does_not_push_out_one_that_is_leaving() -> None:
    """The blocks of the leaving one would not come back before its Push has ended."""
    rig = Rig(num_blocks=6, growth_tokens=1, watermark_fraction=0.0)
    old = rig.start(prompt(30), replace(LONG, max_tokens=40), request="old")
    rig.engine.step()
    move = Move(rig, rig.start(prompt(30, salt=3), LONG, request="leaving"))
    move.steps(3)
    move.drain()
    move.reserve()
    move.ask()
    move.steps(60)
    assert rig.failure(old) is FailReason.PREEMPTED
    rig.assert_right(move.start)
    rig.transfer.end_send(rig.engine, MOVE, "aborted")
    rig.run()
    rig.assert_empty()


def test_the_commit_continues_what_was_reserved_for() -> None:
    move = running()
    move.drain()
    move.reserve()
    move.ask()
    move.steps(4)
    move.level()
    commit = move.source.transfer.commits[MOVE]
    assert isinstance(commit, Commit)
    assert commit.num_tokens == move.second.num_tokens
    [item] = commit.choices
    assert all(isinstance(token, Token) for token in item.tokens)
    assert [*move.second.token_ids, *(token.token_id for token in item.tokens)] == [
        *move.start.token_ids, *move.said()
    ]
