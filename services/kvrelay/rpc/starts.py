"""`Start`, `Cancel` and `Migrate`: core <-> proto."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.core.errors import BadRequest
from kvrelay.core.handoff import Handoff
from kvrelay.core.ids import Attempt, Choice, RequestId, SeqKey, TokenId, TransferId
from kvrelay.core.request import Leg, Migrate, Start
from kvrelay.pb import worker_pb2 as pb
from kvrelay.rpc.records import receiver_from_pb, receiver_to_pb
from kvrelay.rpc.tokens import sampling_from_pb, sampling_to_pb

_LEG_TO_PB = {Leg.LOCAL: pb.LEG_LOCAL, Leg.RECEIVE: pb.LEG_RECEIVE, Leg.SEND: pb.LEG_SEND}
_LEG_FROM_PB = {value: leg for leg, value in _LEG_TO_PB.items()}


def start_to_pb(start: Start) -> pb.Start:
    message = pb.Start(
        request_id=start.request_id,
        attempt=start.attempt,
        choices=start.choices,
        token_ids=start.token_ids,
        num_prompt=start.num_prompt,
        sampling=sampling_to_pb(start.sampling),
        leg=_LEG_TO_PB[start.leg],
        transfer_id=start.transfer_id or "",
        cache_salt=start.cache_salt,
        priority=start.priority,
        replay=start.replay,
        timeout_ms=start.timeout_ms,
    )
    if start.handoff is not None:
        message.transfer_id = start.handoff.transfer_id
        message.num_cached_tokens = start.handoff.num_cached_tokens
        message.receivers.extend(receiver_to_pb(receiver) for receiver in start.handoff.receivers)
    return message


def start_from_pb(message: pb.Start) -> Start:
    """Raises BadRequest for a Start that no worker could do anything with."""
    leg = _checked_leg(message)
    transfer_id = TransferId(message.transfer_id) if leg is not Leg.LOCAL else None
    return Start(
        request_id=RequestId(message.request_id),
        attempt=Attempt(message.attempt),
        choices=tuple(Choice(choice) for choice in message.choices),
        token_ids=tuple(TokenId(token_id) for token_id in message.token_ids),
        num_prompt=message.num_prompt,
        sampling=sampling_from_pb(message.sampling),
        leg=leg,
        transfer_id=transfer_id,
        handoff=_handoff(message) if leg is Leg.SEND else None,
        cache_salt=message.cache_salt,
        priority=message.priority,
        replay=message.replay,
        timeout_ms=message.timeout_ms,
    )


def _handoff(message: pb.Start | pb.Migrate) -> Handoff:
    return Handoff(
        transfer_id=TransferId(message.transfer_id),
        receivers=tuple(receiver_from_pb(receiver) for receiver in message.receivers),
        num_cached_tokens=message.num_cached_tokens,
    )


def _checked_leg(message: pb.Start) -> Leg:
    leg = _LEG_FROM_PB.get(message.leg)
    if leg is None:
        raise BadRequest(f"start of {message.request_id!r} names no known leg ({message.leg})")
    if leg is not Leg.LOCAL and not message.transfer_id:
        raise BadRequest(f"start of {message.request_id!r} for {leg.value} has no transfer id")
    if leg is Leg.SEND and not message.receivers:
        raise BadRequest(f"start of {message.request_id!r} for send has no receivers")
    if not message.choices:
        raise BadRequest(f"start of {message.request_id!r} has no choices")
    if not 0 < message.num_prompt <= len(message.token_ids):
        raise BadRequest(
            f"start of {message.request_id!r} has a prompt of {message.num_prompt} in {len(message.token_ids)} tokens"
        )
    return leg


def migrate_to_pb(migrate: Migrate) -> pb.Migrate:
    key, handoff = migrate.key, migrate.handoff
    return pb.Migrate(
        request_id=key.request_id,
        choice=key.choice,
        attempt=key.attempt,
        to_attempt=migrate.to_attempt,
        num_tokens=migrate.num_tokens,
        transfer_id=handoff.transfer_id,
        receivers=[receiver_to_pb(receiver) for receiver in handoff.receivers],
        num_cached_tokens=handoff.num_cached_tokens,
    )


def migrate_from_pb(message: pb.Migrate) -> Migrate:
    """Whether it makes sense is for the engine to say: it answers with `Stayed`."""
    return Migrate(
        key=SeqKey(RequestId(message.request_id), Choice(message.choice), Attempt(message.attempt)),
        to_attempt=Attempt(message.to_attempt),
        num_tokens=message.num_tokens,
        handoff=_handoff(message),
    )


def cancel_to_pb(request_id: RequestId, attempt: Attempt, choices: Sequence[Choice] = ()) -> pb.Cancel:
    """No choices: all of them."""
    return pb.Cancel(request_id=request_id, attempt=attempt, choices=choices)


def cancelled_keys(message: pb.Cancel, started: Sequence[Choice]) -> tuple[SeqKey, ...]:
    """What a Cancel names. `started` are the choices of its Start, for a Cancel of all."""
    choices: Sequence[int] = message.choices or started
    request_id, attempt = RequestId(message.request_id), Attempt(message.attempt)
    return tuple(SeqKey(request_id, Choice(choice), attempt) for choice in choices)
