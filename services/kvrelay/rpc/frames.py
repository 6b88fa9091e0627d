"""The frames of a Push: core <-> proto."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.core.errors import BadRequest
from kvrelay.core.handoff import ChoiceTokens, Commit, PushOpen, Slab
from kvrelay.core.ids import Attempt, Choice, Incarnation, RequestId, TransferId, WorkerId
from kvrelay.pb import transfer_pb2 as pb
from kvrelay.rpc.records import identity_from_pb, identity_to_pb, shard_from_pb, shard_to_pb
from kvrelay.rpc.tokens import tokens_from_pb, tokens_to_pb


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Nothing to send yet, but the sender lives."""


Frame = PushOpen | Slab | Heartbeat | Commit


def frame_to_pb(frame: Frame) -> pb.PushFrame:
    match frame:
        case PushOpen():
            return pb.PushFrame(open=_open_to_pb(frame))
        case Slab():
            return pb.PushFrame(slab=_slab_to_pb(frame))
        case Commit():
            return pb.PushFrame(commit=_commit_to_pb(frame))
        case Heartbeat():
            return pb.PushFrame(heartbeat=pb.PushHeartbeat())


def frame_from_pb(message: pb.PushFrame) -> Frame:
    """Raises BadRequest for an unknown kind of frame."""
    match message.WhichOneof("kind"):
        case "open":
            return _open_from_pb(message.open)
        case "slab":
            return _slab_from_pb(message.slab)
        case "commit":
            return _commit_from_pb(message.commit)
        case "heartbeat":
            return Heartbeat()
        case kind:
            raise BadRequest(f"a push frame of an unknown kind ({kind})")


def _open_to_pb(frame: PushOpen) -> pb.PushOpen:
    return pb.PushOpen(
        transfer_id=frame.transfer_id,
        request_id=frame.request_id,
        attempt=frame.attempt,
        identity=identity_to_pb(frame.identity),
        shard=shard_to_pb(frame.shard),
        sender=frame.sender,
        sender_incarnation=frame.sender_incarnation,
        receiver_incarnation=frame.receiver_incarnation,
        first_block=frame.first_block,
        num_blocks=frame.num_blocks,
        checksum=frame.checksum,
        tenant=frame.tenant,
        handle=frame.handle,
    )


def _open_from_pb(message: pb.PushOpen) -> PushOpen:
    return PushOpen(
        transfer_id=TransferId(message.transfer_id),
        request_id=RequestId(message.request_id),
        attempt=Attempt(message.attempt),
        identity=identity_from_pb(message.identity),
        shard=shard_from_pb(message.shard),
        sender=WorkerId(message.sender),
        sender_incarnation=Incarnation(message.sender_incarnation),
        receiver_incarnation=Incarnation(message.receiver_incarnation),
        first_block=message.first_block,
        num_blocks=message.num_blocks,
        checksum=message.checksum,
        tenant=message.tenant,
        handle=message.handle,
    )


def _slab_to_pb(frame: Slab) -> pb.PushSlab:
    return pb.PushSlab(
        seq_no=frame.seq_no,
        first_block=frame.first_block,
        num_blocks=frame.num_blocks,
        layer_begin=frame.layer_begin,
        layer_end=frame.layer_end,
        head_begin=frame.head_begin,
        head_end=frame.head_end,
        checksum=frame.checksum,
        payload=frame.payload if isinstance(frame.payload, bytes) else bytes(frame.payload),
    )


def _slab_from_pb(message: pb.PushSlab) -> Slab:
    return Slab(
        seq_no=message.seq_no,
        first_block=message.first_block,
        num_blocks=message.num_blocks,
        layer_begin=message.layer_begin,
        layer_end=message.layer_end,
        head_begin=message.head_begin,
        head_end=message.head_end,
        checksum=message.checksum,
        payload=message.payload,
    )


def _commit_to_pb(frame: Commit) -> pb.PushCommit:
    return pb.PushCommit(
        num_tokens=frame.num_tokens,
        num_slabs=frame.num_slabs,
        choices=[
            pb.ChoiceTokens(choice=choice.choice, tokens=tokens_to_pb(choice.tokens)) for choice in frame.choices
        ],
    )


def _commit_from_pb(message: pb.PushCommit) -> Commit:
    return Commit(
        num_tokens=message.num_tokens,
        num_slabs=message.num_slabs,
        choices=tuple(ChoiceTokens(Choice(item.choice), tokens_from_pb(item.tokens)) for item in message.choices),
    )
