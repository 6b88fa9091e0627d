"""What a worker tells a router about a sequence: core <-> proto."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TypeVar

from kvrelay.core.errors import BadRequest
from kvrelay.core.events import (
    Committed,
    Event,
    Failed,
    FailReason,
    Finished,
    FinishReason,
    FirstToken,
    Leaving,
    Refused,
    RefuseReason,
    Reserved,
    Stayed,
    Token,
    Tokens,
)
from kvrelay.core.handoff import Receiver
from kvrelay.core.ids import Attempt, Choice, RequestId, SeqKey, TransferId
from kvrelay.core.placement import Load
from kvrelay.pb import common_pb2
from kvrelay.pb import worker_pb2 as pb
from kvrelay.rpc.records import load_to_pb, receiver_from_pb, receiver_to_pb
from kvrelay.rpc.tokens import tokens_from_pb, tokens_to_pb

Reason = TypeVar("Reason", bound=Enum)


def step_to_pb(
    events: Sequence[Event], load: Load, receivers_for: Callable[[Event], Sequence[Receiver]] = lambda _: ()
) -> pb.WorkerMessage:
    """One engine step as one message; `receivers_for` says what goes into each `Reserved` in it."""
    message = pb.WorkerMessage()
    message.events.load.CopyFrom(load_to_pb(load))
    message.events.events.extend(event_to_pb(event, receivers_for(event)) for event in events)
    return message


def event_to_pb(event: Event, receivers: Sequence[Receiver] = ()) -> pb.Event:
    """`receivers` go into a `Reserved` only: where this worker's shards can be pushed."""
    key = event.key
    message = pb.Event(request_id=key.request_id, choice=key.choice, attempt=key.attempt)
    match event:
        case Reserved():
            message.reserved.num_cached_tokens = event.num_cached_tokens
            message.reserved.receivers.extend(receiver_to_pb(receiver) for receiver in receivers)
        case Refused():
            message.refused.CopyFrom(
                pb.Refused(reason=event.reason.value, message=event.message, retry_after_ms=event.retry_after_ms)
            )
        case FirstToken():
            message.first_token.CopyFrom(_first_token_to_pb(event))
        case Tokens():
            message.tokens.CopyFrom(pb.Tokens(first_index=event.first_index, tokens=tokens_to_pb(event.tokens)))
        case Committed():
            message.committed.CopyFrom(pb.Committed(first_index=event.first_index, tokens=tokens_to_pb(event.tokens)))
        case Finished():
            message.finished.reason = event.reason.value
        case Failed():
            message.failed.CopyFrom(pb.Failed(reason=event.reason.value, message=event.message))
        case Leaving():
            message.leaving.SetInParent()
        case Stayed():
            message.stayed.CopyFrom(pb.Stayed(transfer_id=event.transfer_id, message=event.message))
    return message


def event_from_pb(message: pb.Event) -> Event:
    """Raises BadRequest for an unknown kind or reason. A `Reserved`'s receivers are in `receivers_of`."""
    key = SeqKey(RequestId(message.request_id), Choice(message.choice), Attempt(message.attempt))
    match message.WhichOneof("kind"):
        case "tokens":
            return Tokens(key, message.tokens.first_index, tokens_from_pb(message.tokens.tokens))
        case "reserved":
            return Reserved(key, message.reserved.num_cached_tokens)
        case "refused":
            refused = message.refused
            return Refused(key, _reason(RefuseReason, refused.reason), refused.message, refused.retry_after_ms)
        case "first_token":
            return _first_token_from_pb(key, message.first_token)
        case "committed":
            return Committed(key, message.committed.first_index, tokens_from_pb(message.committed.tokens))
        case "finished":
            return Finished(key, _reason(FinishReason, message.finished.reason))
        case "failed":
            return Failed(key, _reason(FailReason, message.failed.reason), message.failed.message)
        case "leaving":
            return Leaving(key)
        case "stayed":
            return Stayed(key, TransferId(message.stayed.transfer_id), message.stayed.message)
        case kind:
            raise BadRequest(f"event of {key} is of an unknown kind ({kind})")


def receivers_of(message: pb.Event) -> tuple[Receiver, ...]:
    """Where the reservation can be pushed; empty for anything but a `Reserved`."""
    return tuple(receiver_from_pb(receiver) for receiver in message.reserved.receivers)


def _first_token_to_pb(event: FirstToken) -> pb.FirstToken:
    return pb.FirstToken(
        index=event.index,
        token=tokens_to_pb((event.token,)),
        num_cached_tokens=event.num_cached_tokens,
        queue_ms=event.queue_ms,
        prefill_ms=event.prefill_ms,
        overlap_ms=event.overlap_ms,
    )


def _first_token_from_pb(key: SeqKey, message: pb.FirstToken) -> FirstToken:
    return FirstToken(
        key=key,
        index=message.index,
        token=_one_token(key, message.token),
        num_cached_tokens=message.num_cached_tokens,
        queue_ms=message.queue_ms,
        prefill_ms=message.prefill_ms,
        overlap_ms=message.overlap_ms,
    )


def _one_token(key: SeqKey, column: common_pb2.TokenColumn) -> Token:
    tokens = tokens_from_pb(column)
    if len(tokens) != 1:
        raise BadRequest(f"first token of {key} has {len(tokens)} tokens")
    return tokens[0]


def _reason(kind: type[Reason], text: str) -> Reason:
    try:
        return kind(text)
    except ValueError:
        raise BadRequest(f"unknown {kind.__name__} {text!r}") from None
