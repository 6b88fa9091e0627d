"""What a worker is and how it does: identity, shard, receiver, record and load, core <-> proto."""

from __future__ import annotations

from kvrelay.core.errors import BadRequest
from kvrelay.core.handoff import KvIdentity, KvShard, Receiver
from kvrelay.core.ids import Incarnation, WorkerId
from kvrelay.core.placement import Load, Role, WorkerRecord
from kvrelay.pb import common_pb2, worker_pb2


def identity_to_pb(identity: KvIdentity) -> common_pb2.KvIdentity:
    return common_pb2.KvIdentity(
        model=identity.model,
        rope=identity.rope,
        tokenizer=identity.tokenizer,
        num_layers=identity.num_layers,
        num_kv_heads=identity.num_kv_heads,
        head_dim=identity.head_dim,
        block_size=identity.block_size,
        protocol=identity.protocol,
    )


def identity_from_pb(message: common_pb2.KvIdentity) -> KvIdentity:
    return KvIdentity(
        model=message.model,
        rope=message.rope,
        tokenizer=message.tokenizer,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        block_size=message.block_size,
        protocol=message.protocol,
    )


def shard_to_pb(shard: KvShard) -> common_pb2.KvShard:
    return common_pb2.KvShard(
        layer_begin=shard.layer_begin,
        layer_end=shard.layer_end,
        head_begin=shard.head_begin,
        head_end=shard.head_end,
        dtype=shard.dtype,
        order=shard.order,
    )


def shard_from_pb(message: common_pb2.KvShard) -> KvShard:
    return KvShard(
        layer_begin=message.layer_begin,
        layer_end=message.layer_end,
        head_begin=message.head_begin,
        head_end=message.head_end,
        dtype=message.dtype,
        order=message.order,
    )


def receiver_to_pb(receiver: Receiver) -> common_pb2.Receiver:
    return common_pb2.Receiver(
        worker_id=receiver.worker_id,
        incarnation=receiver.incarnation,
        address=receiver.address,
        shard=shard_to_pb(receiver.shard),
        handle=receiver.handle,
    )


def receiver_from_pb(message: common_pb2.Receiver) -> Receiver:
    return Receiver(
        worker_id=WorkerId(message.worker_id),
        incarnation=Incarnation(message.incarnation),
        address=message.address,
        shard=shard_from_pb(message.shard),
        handle=message.handle,
    )


def record_to_pb(record: WorkerRecord, load: Load) -> worker_pb2.Welcome:
    return worker_pb2.Welcome(
        worker_id=record.worker_id,
        incarnation=record.incarnation,
        role=record.role.value,
        address=record.address,
        push_address=record.push_address,
        model=record.model,
        identity=identity_to_pb(record.identity),
        shard=shard_to_pb(record.shard),
        num_blocks=record.num_blocks,
        max_context=record.max_context,
        pid=record.pid,
        numerics=record.numerics,
        load=load_to_pb(load),
    )


def record_from_pb(message: worker_pb2.Welcome) -> WorkerRecord:
    """The load that came with it is `load_from_pb(message.load)`. Raises BadRequest for an unknown role."""
    try:
        role = Role(message.role)
    except ValueError:
        raise BadRequest(f"worker {message.worker_id!r} has the unknown role {message.role!r}") from None
    return WorkerRecord(
        worker_id=WorkerId(message.worker_id),
        incarnation=Incarnation(message.incarnation),
        role=role,
        address=message.address,
        push_address=message.push_address,
        model=message.model,
        identity=identity_from_pb(message.identity),
        shard=shard_from_pb(message.shard),
        num_blocks=message.num_blocks,
        max_context=message.max_context,
        pid=message.pid,
        numerics=message.numerics,
    )


def load_to_pb(load: Load) -> worker_pb2.Load:
    return worker_pb2.Load(
        num_blocks=load.num_blocks,
        num_free=load.num_free,
        num_cached=load.num_cached,
        num_held=load.num_held,
        num_draining=load.num_draining,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_reserved=load.num_reserved,
        num_sending=load.num_sending,
        waiting_tokens=load.waiting_tokens,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        step_ms=load.step_ms,
        engine_age_ms=load.engine_age_ms,
        draining=load.draining,
    )


def load_from_pb(message: worker_pb2.Load) -> Load:
    return Load(
        num_blocks=message.num_blocks,
        num_free=message.num_free,
        num_cached=message.num_cached,
        num_held=message.num_held,
        num_draining=message.num_draining,
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_reserved=message.num_reserved,
        num_sending=message.num_sending,
        waiting_tokens=message.waiting_tokens,
        prefill_tokens_per_s=message.prefill_tokens_per_s,
        step_ms=message.step_ms,
        engine_age_ms=message.engine_age_ms,
        draining=message.draining,
    )
