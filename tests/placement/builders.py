"""Workers, loads and requests in one line each."""

from __future__ import annotations

from typing import Any

from kvrelay.core.handoff import KvIdentity, KvShard
from kvrelay.core.ids import BlockHash, Incarnation, SessionId, TenantId, WorkerId
from kvrelay.core.placement import (
    Load,
    PlacementRequest,
    Role,
    SessionKey,
    SessionPlacement,
    WorkerRecord,
    WorkerView,
)


def identity(model: str = "m") -> KvIdentity:
    return KvIdentity(model, "rope", "tok", num_layers=2, num_kv_heads=1, head_dim=8, block_size=16)


def worker(
    name: str, role: Role | None = None, *, model: str = "m", max_context: int = 4_096, incarnation: str = "",
    numerics: str = "",
) -> WorkerRecord:
    """The role is read off the name: `p0`, `d0`, `m0`."""
    by_letter = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}
    return WorkerRecord(
        worker_id=WorkerId(name),
        incarnation=Incarnation(incarnation or f"{name}-1"),
        role=role or by_letter[name[0]],
        address=f"127.0.0.1:1{len(name)}",
        push_address="127.0.0.1:2",
        model="demo",
        identity=identity(model),
        shard=KvShard(0, 2, 0, 1, "float32"),
        num_blocks=256,
        max_context=max_context,
        numerics=numerics,
    )


def load(num_free: int = 256, **overrides: Any) -> Load:
    values: dict[str, Any] = {"num_blocks": 256, "num_free": num_free, "num_held": 256 - num_free}
    values.update(overrides)
    return Load(**values)


def view(
    name: str, *, attached: bool = True, model: str = "m", max_context: int = 4_096, numerics: str = "", **loads: Any
) -> WorkerView:
    return WorkerView(worker(name, model=model, max_context=max_context, numerics=numerics), load(**loads), attached)


def request(num_tokens: int = 100, **overrides: Any) -> PlacementRequest:
    values: dict[str, Any] = {"num_tokens": num_tokens, "num_blocks": num_tokens // 16 + 5, "max_tokens": 64}
    values.update(overrides)
    return PlacementRequest(**values)


def session_at(record: WorkerRecord, num_tokens: int = 96, epoch: int = 0) -> SessionPlacement:
    return SessionPlacement(record.worker_id, record.incarnation, epoch, "ab" * 16, num_tokens)


def key(session: str, tenant: str = "default") -> SessionKey:
    return SessionKey(TenantId(tenant), SessionId(session))


def hashes(count: int, seed: int = 0) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(seed.to_bytes(8, "big") + position.to_bytes(8, "big")) for position in range(count))
