"""Every word of core survives the wire, bytes and all."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.core.errors import BadRequest
from kvrelay.core.events import Event, Reserved, Token
from kvrelay.core.handoff import Receiver
from kvrelay.core.ids import Attempt, Choice, RequestId, SeqKey, TokenId
from kvrelay.core.placement import Load, WorkerRecord
from kvrelay.core.request import Migrate, SamplingParams, Start
from kvrelay.pb import common_pb2, transfer_pb2, worker_pb2
from kvrelay.rpc import events, frames, records, starts, tokens
from tests.rpc import strategies as words

light = settings(max_examples=60, deadline=None)


@light
@given(words.columns())
def test_tokens_survive(column: tuple[Token, ...]) -> None:
    wire = tokens.tokens_to_pb(column).SerializeToString()
    assert tokens.tokens_from_pb(common_pb2.TokenColumn.FromString(wire)) == column


def test_minus_infinity_and_no_logprob_are_different_things() -> None:
    impossible = (Token(TokenId(3), -math.inf, ((TokenId(4), -math.inf), (TokenId(5), 0.0))),)
    assert tokens.tokens_from_pb(tokens.tokens_to_pb(impossible)) == impossible
    silent = (Token(TokenId(3)),)
    assert tokens.tokens_from_pb(tokens.tokens_to_pb(silent)) == silent
    certain = (Token(TokenId(3), 0.0),)
    assert tokens.tokens_from_pb(tokens.tokens_to_pb(certain)) == certain


def test_a_column_is_all_or_nothing() -> None:
    with pytest.raises(ValueError, match="for all of them or for none"):
        tokens.tokens_to_pb((Token(TokenId(1), -0.5), Token(TokenId(2))))
    with pytest.raises(ValueError, match="one width"):
        tokens.tokens_to_pb((Token(TokenId(1), -0.5, ((TokenId(1), -0.5),)), Token(TokenId(2), -1.0)))


@pytest.mark.parametrize(
    "column",
    [
        common_pb2.TokenColumn(ids=[1, 2], logprobs=[0.0]),
        common_pb2.TokenColumn(ids=[1, 2], top_width=1, top_ids=[1], top_logprobs=[0.0, 0.0]),
        common_pb2.TokenColumn(ids=[1], top_ids=[1], top_logprobs=[0.0]),
    ],
)
def test_columns_of_different_length_are_refused(column: common_pb2.TokenColumn) -> None:
    with pytest.raises(BadRequest, match="column of"):
        tokens.tokens_from_pb(column)


@light
@given(words.sampling)
def test_sampling_survives(params: SamplingParams) -> None:
    wire = tokens.sampling_to_pb(params).SerializeToString()
    assert tokens.sampling_from_pb(common_pb2.Sampling.FromString(wire)) == params


def test_bias_columns_of_different_length_are_refused() -> None:
    with pytest.raises(BadRequest, match="bias"):
        tokens.sampling_from_pb(common_pb2.Sampling(bias_ids=[1]))


@light
@given(words.starts())
def test_starts_survive(start: Start) -> None:
    wire = starts.start_to_pb(start).SerializeToString()
    assert starts.start_from_pb(worker_pb2.Start.FromString(wire)) == start


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"leg": 0}, "no known leg"),
        ({"leg": 99}, "no known leg"),
        ({"leg": worker_pb2.LEG_RECEIVE}, "no transfer id"),
        ({"leg": worker_pb2.LEG_SEND, "transfer_id": "t"}, "no receivers"),
        ({"choices": []}, "no choices"),
        ({"num_prompt": 0}, "a prompt of 0"),
        ({"num_prompt": 4}, "a prompt of 4 in 3 tokens"),
    ],
)
def test_a_start_that_makes_no_sense_is_refused(change: dict[str, object], why: str) -> None:
    good: dict[str, object] = {
        "request_id": "r",
        "choices": [0],
        "token_ids": [1, 2, 3],
        "num_prompt": 3,
        "leg": worker_pb2.LEG_LOCAL,
    }
    with pytest.raises(BadRequest, match=why):
        starts.start_from_pb(worker_pb2.Start(**{**good, **change}))  # type: ignore[arg-type]


def test_cancel_names_choices_or_all() -> None:
    request_id, attempt = RequestId("r"), Attempt(2)
    one = starts.cancel_to_pb(request_id, attempt, [Choice(1)])
    every = starts.cancel_to_pb(request_id, attempt)
    started = (Choice(0), Choice(1))
    assert starts.cancelled_keys(one, started) == (SeqKey(request_id, Choice(1), attempt),)
    assert starts.cancelled_keys(every, started) == tuple(SeqKey(request_id, choice, attempt) for choice in started)


@light
@given(words.migrate)
def test_a_migrate_survives(migrate: Migrate) -> None:
    wire = starts.migrate_to_pb(migrate).SerializeToString()
    assert starts.migrate_from_pb(worker_pb2.Migrate.FromString(wire)) == migrate


@light
@given(words.event, st.lists(words.receiver, max_size=2))
def test_events_survive(event: Event, receivers: list[Receiver]) -> None:
    wire = worker_pb2.Event.FromString(events.event_to_pb(event, receivers).SerializeToString())
    assert events.event_from_pb(wire) == event
    assert events.receivers_of(wire) == (tuple(receivers) if isinstance(event, Reserved) else ())


@light
@given(st.lists(words.event, max_size=3), words.load)
def test_a_step_is_one_message(step: list[Event], load: Load) -> None:
    wire = worker_pb2.WorkerMessage.FromString(events.step_to_pb(step, load).SerializeToString())
    assert [events.event_from_pb(event) for event in wire.events.events] == step
    assert records.load_from_pb(wire.events.load) == load


@pytest.mark.parametrize(
    "message",
    [
        worker_pb2.Event(request_id="r"),
        worker_pb2.Event(finished=worker_pb2.Finished(reason="boredom")),
        worker_pb2.Event(first_token=worker_pb2.FirstToken()),
    ],
)
def test_events_of_no_known_kind_are_refused(message: worker_pb2.Event) -> None:
    with pytest.raises(BadRequest):
        events.event_from_pb(message)


@light
@given(words.record, words.load)
def test_records_survive(record: WorkerRecord, load: Load) -> None:
    wire = worker_pb2.Welcome.FromString(records.record_to_pb(record, load).SerializeToString())
    assert records.record_from_pb(wire) == record
    assert records.load_from_pb(wire.load) == load


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(BadRequest, match="unknown role 'cook'"):
        records.record_from_pb(worker_pb2.Welcome(worker_id="w", role="cook"))


@light
@given(words.frame | st.just(frames.Heartbeat()))
def test_frames_survive(frame: frames.Frame) -> None:
    wire = frames.frame_to_pb(frame).SerializeToString()
    assert frames.frame_from_pb(transfer_pb2.PushFrame.FromString(wire)) == frame


def test_an_empty_frame_is_refused() -> None:
    with pytest.raises(BadRequest, match="unknown kind"):
        frames.frame_from_pb(transfer_pb2.PushFrame())
