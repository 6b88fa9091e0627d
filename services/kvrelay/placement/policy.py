"""Which workers a request goes to: one pure function of what the router knows.

    candidates          attached, not draining, engine moving, the sequence fits its context
      decode / mixed    and the whole output that was promised, if any worker has that much context,
                        and room for the request's blocks (a replay needs none: it was admitted once)
      prefill           any; a queue is a cost, not an obstacle
    relay  pair         equal KvIdentity and equal numerics, always
    local  decode alone no prefill worker fits, or the prediction says so

Predicted time to first token, in milliseconds (uncached = tokens that the worker is not said to hold):

    relay = (waiting + uncached on prefill) / prefill rate + uncached on decode / transfer rate
    local = (waiting + uncached on decode) / decode rate, and the stall that this computing causes to its streams

The pair that minimises relay is the best prefill worker with the best decode worker of one identity, because no term
has both: n + m evaluations, not n · m. Ties go to the smaller id, so equal snapshots give equal placements.

A request that has drawn tokens in one arithmetic stays with it while any such worker is left (exact mode).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.core.config import PlacementSettings
from kvrelay.core.handoff import KvIdentity
from kvrelay.core.ids import WorkerId
from kvrelay.core.placement import (
    Hints,
    Mode,
    Placement,
    PlacementRequest,
    Role,
    Snapshot,
    WorkerView,
)

DEFAULT_PREFILL_TOKENS_PER_S = 1_000.0
"""Until a worker has measured its own: a 135M model on two cores."""
TRANSFER_TOKENS_PER_S = 40_000.0
"""1 GB/s of loopback gRPC at 23 KB of KV per token. Only the order of magnitude matters beside computing."""
STALL_FACTOR = 3.0
"""A local prefill makes every stream of that decode worker wait: it counts this much more per stream it holds up."""
MIN_STALL_MS = 50.0
"""What a local prefill costs at least: decode workers are there to decode, so relay wins what is about equal."""
STREAM_MS = 5.0
"""Every stream on a decode worker makes the others' steps about this much longer on the smallest machine."""
PRESSURE_MS = 100.0
"""Cost of a full pool: growing streams of a crowded worker get preempted, and a replay costs far more than this."""
STUCK_MS = 10_000.0
STUCK_STEPS = 4.0
"""An engine that has not finished a step for 10 s and for four of its usual steps gets no new work."""


@dataclass(frozen=True, slots=True)
class _Scored:
    """A candidate with its cost. Sorts best first; the ids make the order total."""

    view: WorkerView
    is_excluded: bool
    lacks_room: bool
    cost_ms: float
    uncached: int

    @property
    def rank(self) -> tuple[bool, bool, float, str, str]:
        record = self.view.record
        return (self.is_excluded, self.lacks_room, self.cost_ms, record.worker_id, record.incarnation)


def place(
    request: PlacementRequest, snapshot: Snapshot, hints: Hints, settings: PlacementSettings
) -> Placement | None:
    """None: no worker can take it now. Excluded workers are used only when nobody else is left."""
    usable = [view for view in snapshot.workers if _is_usable(view, request)]
    prefills = [_score_prefill(view, request, hints) for view in usable if view.record.role is Role.PREFILL]
    if request.max_tokens <= 1:
        only = _prefill_only(prefills, usable, request, hints)
        if only is not None:
            return only
    holders = [view for view in _within_reach(usable, request) if _can_hold(view, request)]
    decodes = [_score_decode(view, request, hints) for view in holders]
    options = [_best_of_kind(group, prefills, request, settings) for group in _by_kind(decodes)]
    return min(options, key=lambda option: option[0])[1] if options else None


_Option = tuple[tuple[int, bool, float, str, str, str], Placement]
"""How good a placement is (smaller is better, total order), and the placement."""


def _is_usable(view: WorkerView, request: PlacementRequest) -> bool:
    load = view.load
    if not view.attached or load.draining:
        return False
    if load.engine_age_ms > max(STUCK_MS, STUCK_STEPS * load.step_ms):
        return False
    return request.num_tokens + min(1, request.max_tokens) <= view.record.max_context


def _within_reach(usable: list[WorkerView], request: PlacementRequest) -> list[WorkerView]:
    """Those that can keep the promise, full or not; everybody where nobody can."""
    able = [
        view for view in usable
        if view.record.role.can_decode and view.record.max_context >= request.reach
        and not _is_last_resort(view, request)
    ]  # fmt: skip
    return able if request.reach and able else usable


def _can_hold(view: WorkerView, request: PlacementRequest) -> bool:
    return view.record.role.can_decode and (request.replay or _has_room(view, request))


def _has_room(view: WorkerView, request: PlacementRequest) -> bool:
    """Reserved blocks are held blocks already: what is free or merely cached is what a newcomer can have."""
    return request.num_blocks <= view.load.num_available


def _cached_tokens(view: WorkerView, request: PlacementRequest, hints: Hints) -> int:
    """Tokens this worker is said to hold; at least one is always left to compute."""
    record = view.record
    held = hints.prefix_holders.get(record.worker_id, 0) * record.identity.block_size
    session = hints.session
    if session is not None and (session.decode_worker, session.incarnation) == (record.worker_id, record.incarnation):
        block_size = record.identity.block_size
        held = max(held, session.num_tokens // block_size * block_size)
    return max(0, min(held, request.num_tokens - 1))


def _compute_ms(view: WorkerView, num_tokens: int, assumed_rate: float) -> float:
    return num_tokens * 1_000.0 / (view.load.prefill_tokens_per_s or assumed_rate)


def _score_prefill(view: WorkerView, request: PlacementRequest, hints: Hints) -> _Scored:
    uncached = request.num_tokens - _cached_tokens(view, request, hints)
    cost = _compute_ms(view, view.load.waiting_tokens + uncached, DEFAULT_PREFILL_TOKENS_PER_S)
    return _Scored(view, _is_last_resort(view, request), False, cost, uncached)


def _score_decode(view: WorkerView, request: PlacementRequest, hints: Hints) -> _Scored:
    load = view.load
    uncached = request.num_tokens - _cached_tokens(view, request, hints)
    streams = load.num_running + load.num_waiting + load.num_reserved
    pressure = (load.num_held + load.num_draining) / load.num_blocks if load.num_blocks else 0.0
    cost = uncached * 1_000.0 / TRANSFER_TOKENS_PER_S + STREAM_MS * streams + PRESSURE_MS * pressure**2
    lacks_room = not _has_room(view, request)
    return _Scored(view, _is_last_resort(view, request), lacks_room, cost, uncached)


def _is_last_resort(view: WorkerView, request: PlacementRequest) -> bool:
    """It failed this request before, or would go on with other bits than those that the client has."""
    record = view.record
    return record.worker_id in request.excluded or request.numerics not in ("", record.numerics)


def _kind(scored: _Scored) -> tuple[KvIdentity, str]:
    """Workers of one kind may hand over to each other: their KV means the same, and comes from the same arithmetic."""
    record = scored.view.record
    return record.identity, record.numerics


def _by_kind(decodes: Iterable[_Scored]) -> list[list[_Scored]]:
    groups: dict[object, list[_Scored]] = {}
    for scored in decodes:
        groups.setdefault(_kind(scored), []).append(scored)
    return list(groups.values())


def _best_of_kind(
    decodes: list[_Scored], prefills: list[_Scored], request: PlacementRequest, settings: PlacementSettings
) -> _Option:
    """The best relay and the best local placement among workers of one kind, compared."""
    decode = min(decodes, key=lambda scored: scored.rank)
    partners = [scored for scored in prefills if _kind(scored) == _kind(decode)]
    prefill = min(partners, key=lambda scored: scored.rank) if partners else None
    local = min((_local(scored, prefill) for scored in decodes), key=lambda option: option[0])
    if prefill is None:
        return local
    if decode.view.record.role is Role.MIXED:
        return _local(decode, prefill, "a mixed worker computes its own prompts")
    if settings.always_relay and not prefill.is_excluded:
        return _relay(prefill, decode)
    if decode.uncached < settings.local_below_tokens:
        return _local(decode, prefill, f"{decode.uncached} uncached tokens are below local_below_tokens")
    return min(_relay(prefill, decode), local, key=lambda option: option[0])


def _relay(prefill: _Scored, decode: _Scored) -> _Option:
    cost = prefill.cost_ms + decode.cost_ms
    p, d = prefill.view.record, decode.view.record
    note = _last_resort(prefill, decode)
    reason = f"relay {p.worker_id}>{d.worker_id}: {cost:.0f} ms, {prefill.uncached} uncached{note}"
    rank = (prefill.is_excluded + decode.is_excluded, decode.lacks_room, cost, d.worker_id, p.worker_id, d.incarnation)
    return rank, Placement(Mode.RELAY, p, d, reason)


def _local(decode: _Scored, prefill: _Scored | None, why: str = "") -> _Option:
    """`prefill` is the alternative: without one there is no choice to stall for, and its rate is the best guess."""
    load, record = decode.view.load, decode.view.record
    assumed = prefill.view.load.prefill_tokens_per_s if prefill is not None else 0.0
    own = _compute_ms(decode.view, decode.uncached, assumed or DEFAULT_PREFILL_TOKENS_PER_S)
    queue = _compute_ms(decode.view, load.waiting_tokens, assumed or DEFAULT_PREFILL_TOKENS_PER_S)
    stall = 0.0
    if prefill is not None and record.role is Role.DECODE:
        stall = MIN_STALL_MS + own * STALL_FACTOR * load.num_running
    transfer_saved = decode.uncached * 1_000.0 / TRANSFER_TOKENS_PER_S
    cost = queue + own + stall + decode.cost_ms - transfer_saved
    why = why or ("no prefill worker fits" if prefill is None else "cheaper than the relay")
    reason = f"local {record.worker_id}: {cost:.0f} ms, {decode.uncached} uncached, {why}{_last_resort(decode)}"
    rank = (int(decode.is_excluded), decode.lacks_room, cost, record.worker_id, "", record.incarnation)
    return rank, Placement(Mode.LOCAL, None, record, reason)


def _prefill_only(
    prefills: list[_Scored], usable: list[WorkerView], request: PlacementRequest, hints: Hints
) -> Placement | None:
    """One token: nothing to hand over. An excluded prefill worker waits behind any decode worker that is not."""
    best = min(prefills, key=lambda scored: scored.rank, default=None)
    if best is None:
        return None
    if best.is_excluded and any(
        _can_hold(view, request) and not _is_last_resort(view, request) for view in usable
    ):
        return None
    record = best.view.record
    reason = f"prefill only {record.worker_id}: {best.cost_ms:.0f} ms, one token needs no decode{_last_resort(best)}"
    return Placement(Mode.RELAY, record, None, reason)


def _last_resort(*scored: _Scored) -> str:
    names: list[WorkerId] = [item.view.record.worker_id for item in scored if item.is_excluded]
    return f" (last resort: {', '.join(names)} failed before or computes otherwise)" if names else ""
