"""The parts by themselves: token log, delivery, waiting room, admission, mailbox."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.core.errors import Broken, NoRoom, Unavailable
from kvrelay.core.events import FinishReason, Token
from kvrelay.core.ids import Choice, RequestId, TokenId
from kvrelay.core.output import ChoiceFinished, Delta, Output, Started
from kvrelay.router.admission import Admission, Ticket, WaitingRoom
from kvrelay.router.delivery import Delivery, SlowReader
from kvrelay.router.mailbox import Mailbox
from kvrelay.router.output_stage import Answer
from kvrelay.router.token_log import ProtocolError, TokenLog
from kvrelay.text.output import OutputText
from tests.router.table import Letters, words
from tests.support.virtual_time import run_virtual

SONG = "the quick brown fox jumps over the lazy dog"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 45), st.integers(0, 12)), max_size=40))
def test_whatever_order_tokens_come_in_the_log_is_a_prefix_of_the_truth(windows: list[tuple[int, int]]) -> None:
    """Windows of the true output come late, twice, overlapping or too early: only gaps are refused."""
    log = TokenLog()
    truth = [Token(token_id) for token_id in words(SONG)]
    for first, length in windows:
        window = truth[first : first + length]
        before = log.next_index
        if first > before:
            with pytest.raises(ProtocolError):
                log.unseen(first, window)
            continue
        for token in log.unseen(first, window):
            log.append(token)
        assert log.next_index == max(before, min(first + length, len(truth)))
        assert list(log.ids) == list(words(SONG))[: log.next_index]


def test_another_token_at_a_known_index_is_an_error() -> None:
    log = TokenLog(words("ab"))
    with pytest.raises(ProtocolError, match="token 1"):
        log.unseen(1, (Token(TokenId(7)), Token(TokenId(8))))
    assert log.next_index == 2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=30), st.sampled_from([(), ("fox j",), ("brown fox", "own"), ("zzz",)]),
       st.integers(0, 20))
def test_text_and_indices_do_not_depend_on_how_tokens_were_cut(
    cuts: list[int], stops: tuple[str, ...], num_resumed: int
) -> None:
    song = words(SONG)
    if any(stop in SONG[:num_resumed] for stop in stops):
        return
    answer = Answer(Choice(0), OutputText(Letters(), stops), song[:num_resumed])
    outputs = answer.resume()
    position = num_resumed
    for cut in [*cuts, len(song)]:
        if answer.is_done:
            break
        outputs += answer.accept(position, [Token(token_id) for token_id in song[position : position + cut]])
        position = min(position + cut, len(song))
    if not answer.is_done:
        outputs += answer.finish(FinishReason.LENGTH)
    end = min([SONG.index(stop) for stop in stops if stop in SONG], default=len(SONG))
    deltas = [each for each in outputs if isinstance(each, Delta)]
    shown = [token.token_id for delta in deltas for token in delta.tokens]
    text = "".join(delta.text for delta in deltas)
    assert SONG[:end].endswith(text)
    if num_resumed == 0:
        assert text == SONG[:end]
    assert shown == list(song[num_resumed : num_resumed + len(shown)])
    for delta in deltas:
        assert len(delta.text_offsets) == len(delta.tokens)
    assert isinstance(outputs[-1], ChoiceFinished)


@settings(max_examples=200, deadline=None)
@given(st.text("abX", max_size=30), st.lists(st.text("abX", min_size=1, max_size=4), min_size=1, max_size=3),
       st.lists(st.integers(1, 3), max_size=30), st.data())
def test_a_caller_who_says_how_much_text_it_has_gets_the_rest(
    song: str, stops: list[str], sizes: list[int], data: st.DataObject
) -> None:
    """Tokens of one to three letters: a stop string may begin in the middle of one, which is then half shown."""
    pieces, left = [], song
    for size in [*sizes, *[2] * 30]:
        pieces, left = [*pieces, left[:size].encode()], left[size:]
    tokens = [Token(TokenId(i)) for i, piece in enumerate(pieces) if piece]

    class Pieces:
        def token_bytes(self, token_id: int) -> bytes:
            return pieces[token_id]

    def answer(resume: list[TokenId], chars: int | None) -> Answer:
        return Answer(Choice(0), OutputText(Pieces(), tuple(stops)), resume, resume_chars=chars)

    def rest(of: Answer) -> tuple[str, list[TokenId], ChoiceFinished]:
        outputs = of.resume()
        if not of.is_done:
            outputs += of.accept(of.log.next_index, tokens[of.log.next_index :])
        if not of.is_done:
            outputs += of.finish(FinishReason.LENGTH)
        return _said(outputs)

    whole = rest(answer([], None))
    first = answer([], None)
    text, ids, _ = _said(first.accept(0, tokens[: data.draw(st.integers(0, len(tokens)))]))
    if first.is_done:
        return
    more, more_ids, finished = rest(answer(ids, len(text)))
    assert (text + more, ids + more_ids, finished) == whole


def _said(outputs: list[Output]) -> tuple[str, list[TokenId], ChoiceFinished]:
    deltas = [each for each in outputs if isinstance(each, Delta)]
    ids = [token.token_id for delta in deltas for token in delta.tokens]
    ends = [each for each in outputs if isinstance(each, ChoiceFinished)]
    return "".join(delta.text for delta in deltas), ids, ends[0] if ends else ChoiceFinished(Choice(0), "open")


def test_a_delivery_gives_what_was_queued_and_then_the_error() -> None:
    async def story() -> None:
        delivery = Delivery(4)
        started = Started(RequestId("r"), 1, 2)
        delivery.put(started)
        delivery.end(Unavailable("gone"))
        delivery.end(None)
        assert delivery.take() == [started]
        with pytest.raises(Unavailable):
            delivery.take()

    run_virtual(story())


def test_a_delivery_is_bounded() -> None:
    async def story() -> None:
        delivery = Delivery(1)
        delivery.put(Started(RequestId("r"), 1, 2))
        with pytest.raises(SlowReader):
            delivery.put(Started(RequestId("r"), 1, 2))

    run_virtual(story())


def test_a_mailbox_that_overflows_fails_its_reader_only() -> None:
    async def story() -> None:
        mailbox: Mailbox[int] = Mailbox(2)
        for number in range(5):
            mailbox.put(number)
        with pytest.raises(Broken):
            await mailbox.get()

    run_virtual(story())


def test_admission_counts_and_drains() -> None:
    admission = Admission(2)
    admission.enter()
    admission.enter()
    with pytest.raises(NoRoom):
        admission.enter()
    admission.leave()
    admission.drain()
    with pytest.raises(Unavailable):
        admission.enter()
    assert admission.num_inflight == 1


class Turns:
    def __init__(self) -> None:
        self.taken: list[str] = []

    def ticket(self, name: str, *, replay: bool = False, priority: int = 0) -> Ticket:
        return Ticket.new(replay=replay, priority=priority, your_turn=lambda: self.taken.append(name))


def test_turns_go_to_replays_first_then_by_priority_then_by_arrival() -> None:
    room, turns = WaitingRoom(), Turns()
    head = turns.ticket("head")
    room.enter(head)
    tickets = {
        name: turns.ticket(name, replay=replay, priority=priority)
        for name, replay, priority in (("late", False, 0), ("urgent", False, 5), ("replay", True, 0))
    }
    for ticket in tickets.values():
        room.enter(ticket)
    room.leave(head)
    for name in ("replay", "urgent", "late"):
        assert turns.taken[-1] == name
        room.leave(tickets[name])
    assert turns.taken == ["head", "replay", "urgent", "late"]
    assert len(room) == 0


def test_a_head_that_cannot_be_placed_waits_for_a_change() -> None:
    room, turns = WaitingRoom(), Turns()
    first, second = turns.ticket("first"), turns.ticket("second")
    room.enter(first)
    room.enter(second)
    room.not_now(first)
    assert turns.taken == ["first"]
    room.changed()
    assert turns.taken == ["first", "first"]
    room.leave(first)
    assert turns.taken == ["first", "first", "second"]


def test_a_newcomer_at_the_head_need_not_wait_for_a_change() -> None:
    room, turns = WaitingRoom(), Turns()
    first = turns.ticket("first")
    room.enter(first)
    room.not_now(first)
    room.enter(turns.ticket("replay", replay=True))
    assert turns.taken == ["first", "replay"]


def test_leaving_with_the_turn_hands_it_on() -> None:
    room, turns = WaitingRoom(), Turns()
    first = turns.ticket("first")
    room.enter(first)
    room.enter(turns.ticket("second"))
    room.leave(first)
    room.leave(first)
    assert turns.taken == ["first", "second"]


async def test_reading_waits_for_writing() -> None:
    delivery = Delivery(4)
    reading = asyncio.ensure_future(anext(aiter(delivery)))
    await asyncio.sleep(0)
    delivery.put(Started(RequestId("r"), 1, 2))
    assert await reading == Started(RequestId("r"), 1, 2)
