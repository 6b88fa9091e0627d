"""The counter at which the cluster keeps its advice: who is there, where a session last decoded, who holds a prefix.

Everything here may be late, lost or wrong. A worker lives by its lease, a router learns of it by `workers` and
`events`, and both go on without either: running streams never ask, new requests fall back on the Attach streams.

    register ─▶ [lease] ─renew─▶ [lease] … ─leave─▶ gone
                   └─ lease runs out, or the store was flushed: gone until the next renew, which joins again
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvrelay.core.ids import BlockHash, Incarnation, TenantId, WorkerId
from kvrelay.core.placement import Load, SessionKey, SessionPlacement, WorkerRecord

MAX_HOLDERS = 8
"""Workers remembered per prefix block: more copies than that say "it is everywhere"."""
PREFIX_TTL_S = 600.0
MAX_MARKED = 256
_DENSE, _SPARSE = 64, 512


class EventKind(Enum):
    JOIN = "join"
    DRAIN = "drain"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class RegistryEvent:
    kind: EventKind
    worker_id: WorkerId
    incarnation: Incarnation
    record: WorkerRecord | None = None
    """Set for JOIN."""


@dataclass(frozen=True, slots=True)
class Quota:
    """A token bucket shared by all routers: holds `burst`, refills by `rate_per_s`."""

    rate_per_s: float
    burst: float


class Registry(Protocol):
    """What routers and workers ask. `open_registry` gives one that never raises for trouble with the store."""

    async def register(self, record: WorkerRecord, load: Load) -> None:
        """Take a lease of `lease_s` and tell everybody."""
        ...

    async def renew(self, record: WorkerRecord, load: Load) -> None:
        """Extend the lease. Joins again if it was lost; tells everybody once when `load.draining` becomes true."""
        ...

    async def leave(self, record: WorkerRecord) -> None:
        """Give the lease up, unless a newer incarnation holds it already."""
        ...

    async def workers(self) -> list[WorkerRecord]:
        """All leases, ordered by worker id."""
        ...

    def events(self) -> AsyncIterator[RegistryEvent]:
        """Never ends and survives outages. Begins, and begins again after an outage, with a JOIN for every worker."""
        ...

    async def get_session(self, key: SessionKey) -> SessionPlacement | None: ...

    async def set_session(
        self, key: SessionKey, placement: SessionPlacement, expected_epoch: int
    ) -> SessionPlacement:
        """Compare-and-set: stored with epoch `expected_epoch + 1` if the stored epoch is `expected_epoch` (0: none
        yet) or if nothing readable is stored. Returns what is stored afterwards: the winner's value."""
        ...

    async def prefix_holders(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        """How many leading blocks of this chain each worker is said to hold."""
        ...

    async def add_prefix(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Note that a worker holds the blocks of this chain."""
        ...

    async def take_quota(self, tenant: TenantId, amount: float, quota: Quota) -> float:
        """Take `amount` from the tenant's bucket. 0: taken; else nothing was, and it lacks this many seconds."""
        ...

    async def close(self) -> None: ...


def marked_positions(num_blocks: int) -> list[int]:
    """Positions of a chain that are noted and looked up: all of the first 64, then every 8th, from 512 every 64th.

    A block's hash names everything before it, so a mark at position i speaks for i + 1 leading blocks. The positions
    do not depend on the length of the chain: two prompts with a common beginning meet at common marks.
    """
    dense = range(min(num_blocks, _DENSE))
    sparse = range(_DENSE + 7, min(num_blocks, _SPARSE), 8)
    coarse = range(_SPARSE + 63, num_blocks, 64)
    return [*dense, *sparse, *coarse][:MAX_MARKED]
