"""What a request says when it looks for workers: how much it needs, whom it avoids, and whether it can fit at all."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.core.config import Config
from kvrelay.core.errors import BadRequest, KvrelayError, NoRoom, Unavailable
from kvrelay.core.ids import BlockHash, Choice, WorkerId
from kvrelay.core.kv import blocks_for
from kvrelay.core.output import GenerateRequest
from kvrelay.core.placement import Placement, PlacementRequest, Snapshot, WorkerRecord
from kvrelay.router.admission import Ticket


@dataclass(eq=False, slots=True)
class Ask:
    """Choices that look for a place together, in the waiting room or under way to a worker that may still refuse."""

    ticket: Ticket
    choices: tuple[Choice, ...]
    replay: bool
    held_off: dict[WorkerId, float] = field(default_factory=dict)
    """Workers that had no room, and when to ask them again."""
    retry_after_s: float = 1.0

    def hold_off(self, worker_id: WorkerId, until: float, retry_after_s: float) -> None:
        self.held_off[worker_id] = until
        self.retry_after_s = max(1.0, retry_after_s)

    def held_now(self, now: float) -> frozenset[WorkerId]:
        return frozenset(worker_id for worker_id, until in self.held_off.items() if until > now)


@dataclass(frozen=True, slots=True)
class Need:
    """The size of one Start."""

    num_tokens: int
    num_choices: int
    num_remaining: int
    """Output tokens still wanted per choice."""
    is_promised: bool = False
    """The client has said how many; a worker with less context would end it early."""

    def num_blocks(self, block_size: int, growth_tokens: int) -> int:
        growth = blocks_for(min(growth_tokens, self.num_remaining), block_size)
        return blocks_for(self.num_tokens, block_size) + self.num_choices * growth


def placement_request(
    need: Need, snapshot: Snapshot, config: Config, hashes: tuple[BlockHash, ...], excluded: frozenset[WorkerId],
    replay: bool, numerics: str,
) -> PlacementRequest:
    records = _holders(snapshot)
    block_size = records[0].identity.block_size if records else config.engine.block_size
    wanted = need.num_blocks(block_size, config.engine.growth_tokens)
    largest = max((record.num_blocks for record in records), default=wanted)
    return PlacementRequest(
        num_tokens=need.num_tokens,
        num_blocks=min(wanted, largest),
        max_tokens=need.num_remaining,
        hashes=hashes,
        excluded=excluded,
        replay=replay,
        reach=need.num_tokens + need.num_remaining if need.is_promised else 0,
        numerics=numerics,
    )


MIN_TO_MOVE = 2
"""Tokens still wanted. A choice that lacks one has it by the time a worker has reserved for it."""


def targets(source: WorkerRecord, avoid: frozenset[WorkerId], snapshot: Snapshot) -> Snapshot:
    """Where a running sequence can go with its KV: workers that read the same numbers from it, and count alike."""
    return Snapshot(tuple(
        view for view in snapshot.workers
        if view.record.role.can_decode
        and (view.record.identity, view.record.numerics) == (source.identity, source.numerics)
        and view.record.worker_id not in avoid | {source.worker_id}
    ))  # fmt: skip


def check_fits(request: GenerateRequest, snapshot: Snapshot) -> None:
    """Raises BadRequest, with limit and counts, when no attached worker could ever hold prompt and `max_tokens`."""
    limit = max((record.max_context for record in _holders(snapshot)), default=0)
    num_prompt, max_tokens = len(request.prompt_ids), request.sampling.max_tokens
    if limit and num_prompt + max_tokens > limit:
        raise BadRequest(
            f"this model's maximum context length is {limit} tokens, but {num_prompt + max_tokens} were requested "
            f"({num_prompt} in the prompt, {max_tokens} for the output)",
            param="max_tokens" if num_prompt < limit else None,
            code="context_length_exceeded",
        )


def worker_ids(placement: Placement) -> frozenset[WorkerId]:
    return frozenset(record.worker_id for record in (placement.prefill, placement.decode) if record is not None)


def waited_too_long(ask: Ask, snapshot: Snapshot, waited_s: float) -> KvrelayError:
    if not _holders(snapshot):
        return Unavailable(f"no worker is attached to this router; waited {waited_s:.0f} s for one")
    return NoRoom(f"no worker had room within {waited_s:.0f} s", retry_after_s=ask.retry_after_s)


def _holders(snapshot: Snapshot) -> list[WorkerRecord]:
    attached = [view.record for view in snapshot.workers if view.attached]
    return [record for record in attached if record.role.can_decode] or attached
