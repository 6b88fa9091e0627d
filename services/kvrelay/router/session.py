"""What Redis knows about a request, asked before the first placement and told after the end, never in between.

    hints     one look-up, bounded by the registry's call timeout; empty when Redis is away
    remember  after the end: the session's decode worker (compare-and-set) and who holds the prompt's blocks,
              as a task of its own that nobody waits for but `close`
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvrelay.core.hashing import chain, root_hash
from kvrelay.core.ids import BlockHash, TenantId, TokenId
from kvrelay.core.output import GenerateRequest
from kvrelay.core.placement import Hints, SessionKey, SessionPlacement, WorkerRecord
from kvrelay.placement.registry import Registry

log = logging.getLogger(__name__)

MAX_PENDING = 1024
"""Notes to Redis under way at once. More are dropped: they are advice."""


def cache_salt(tenant: TenantId) -> bytes:
    """Separates the tenants' prefix caches."""
    return tenant.encode()


def block_hashes(record: WorkerRecord, tenant: TenantId, token_ids: Sequence[TokenId]) -> tuple[BlockHash, ...]:
    """Names of the full blocks of a sequence, as this worker's own prefix cache would call them."""
    root = root_hash(cache_salt(tenant), record.identity.fingerprint(), record.shard.dtype)
    return tuple(chain(root, token_ids, record.identity.block_size))


class SessionBook:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._pending: set[asyncio.Task[None]] = set()

    async def hints(self, request: GenerateRequest, hashes: tuple[BlockHash, ...]) -> Hints:
        session: SessionPlacement | None = None
        if request.session is not None:
            session = await self._registry.get_session(SessionKey(request.tenant, request.session))
        holders = await self._registry.prefix_holders(hashes) if hashes else {}
        return Hints(session, holders)

    def remember(
        self, request: GenerateRequest, hints: Hints, workers: Sequence[WorkerRecord], output: Sequence[TokenId]
    ) -> None:
        """`workers`: those that computed or received the sequence, the decode worker first."""
        if not workers or len(self._pending) >= MAX_PENDING:
            return
        task = asyncio.get_running_loop().create_task(
            self._write(request, hints, tuple(workers), tuple(output)), name=f"remember {request.request_id}"
        )
        self._pending.add(task)
        task.add_done_callback(self._written)

    async def close(self) -> None:
        """Waits for what is under way; every registry call has a timeout."""
        while self._pending:
            await asyncio.wait(set(self._pending))

    async def _write(
        self, request: GenerateRequest, hints: Hints, workers: tuple[WorkerRecord, ...], output: tuple[TokenId, ...]
    ) -> None:
        """The last token was drawn but its KV never computed. A prefill worker has seen the prompt only."""
        computed = (*request.prompt_ids, *output)[:-1]
        for record in workers:
            decodes = record.role.can_decode
            hashes = block_hashes(record, request.tenant, computed if decodes else request.prompt_ids)
            if hashes:
                await self._registry.add_prefix(record.worker_id, hashes)
            if decodes and request.session is not None:
                epoch = hints.session.epoch if hints.session is not None else 0
                tail = hashes[-1].hex() if hashes else ""
                placement = SessionPlacement(record.worker_id, record.incarnation, epoch + 1, tail, len(computed))
                await self._registry.set_session(SessionKey(request.tenant, request.session), placement, epoch)

    def _written(self, task: asyncio.Task[None]) -> None:
        self._pending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("could not note where a request ran", exc_info=error)
