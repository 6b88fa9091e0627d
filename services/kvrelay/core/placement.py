"""What the router knows of the workers, and what it decides from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvrelay.core.handoff import KvIdentity, KvShard
from kvrelay.core.ids import BlockHash, Incarnation, SessionId, TenantId, WorkerId


class Role(Enum):
    """Configuration, not code: reserve, push and start are the same in every role."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def can_decode(self) -> bool:
        return self is not Role.PREFILL


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker process as it presents itself, in Redis and in `Welcome`. Never changes while it lives."""

    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    address: str
    """host:port of its Attach service."""
    push_address: str
    """host:port of its KvTransfer service."""
    model: str
    """The served name."""
    identity: KvIdentity
    shard: KvShard
    num_blocks: int
    max_context: int
    """Longest sequence in tokens that this worker accepts: min(model context, its pool)."""
    pid: int = 0
    numerics: str = ""
    """Exact mode: which arithmetic the bits come from, such as "native/amx_bf16@1f…/bfloat16". Empty: fast."""


@dataclass(frozen=True, slots=True)
class Load:
    """A worker's beat. `num_free + num_cached + num_held + num_draining = num_blocks`, always."""

    num_blocks: int = 0
    num_free: int = 0
    num_cached: int = 0
    """Unreferenced blocks kept for their content; evictable, so no pressure."""
    num_held: int = 0
    num_draining: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_reserved: int = 0
    """Reservations whose KV has not arrived yet."""
    num_sending: int = 0
    waiting_tokens: int = 0
    """Prompt tokens not yet computed, of everything accepted."""
    prefill_tokens_per_s: float = 0.0
    """Measured; 0 until known."""
    step_ms: float = 0.0
    """Moving average of a step."""
    engine_age_ms: float = 0.0
    """Since the engine last finished a step or was idle: grows only while it is stuck."""
    draining: bool = False

    @property
    def num_available(self) -> int:
        return self.num_free + self.num_cached


@dataclass(frozen=True, slots=True)
class WorkerView:
    record: WorkerRecord
    load: Load
    attached: bool = True
    """An Attach stream to it is up. Without one it can get no work."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything `place` may look at, frozen."""

    workers: tuple[WorkerView, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionPlacement:
    """Where a session's last turn decoded. A hint: it scores, it never promises."""

    decode_worker: WorkerId
    incarnation: Incarnation
    epoch: int
    """Grows by one with each compare-and-set."""
    tail_hash: str
    """Hex hash of the last full block."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Hints:
    """Advice from Redis for one request; empty when Redis is away."""

    session: SessionPlacement | None = None
    prefix_holders: Mapping[WorkerId, int] = field(default_factory=dict)
    """How many leading blocks of this prompt a worker is said to hold."""


class Mode(Enum):
    RELAY = "relay"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    num_tokens: int
    num_blocks: int
    """Blocks for these tokens plus the growth allowance of every choice."""
    max_tokens: int
    """Output still wanted. 1 means that decode is never needed."""
    hashes: tuple[BlockHash, ...] = ()
    excluded: frozenset[WorkerId] = frozenset()
    """Workers that failed or refused this request; used again only when nobody else is left."""
    replay: bool = False
    reach: int = 0
    """Length of the whole sequence that the client was promised, in tokens; 0: whatever fits where it runs."""
    numerics: str = ""
    """The arithmetic that drew the tokens so far: others continue only when no worker of that kind is left."""


@dataclass(frozen=True, slots=True)
class Placement:
    mode: Mode
    prefill: WorkerRecord | None
    decode: WorkerRecord | None
    """None for a relay placement whose one token needs no decode worker."""
    reason: str
    """For the trace and the log: why this one."""


@dataclass(frozen=True, slots=True)
class SessionKey:
    tenant: TenantId
    session: SessionId
