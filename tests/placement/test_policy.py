"""Placement as tables, and what must hold for every snapshot."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.core.config import PlacementSettings
from kvrelay.core.ids import WorkerId
from kvrelay.core.placement import Hints, Load, Mode, Placement, PlacementRequest, Role, Snapshot, WorkerView
from kvrelay.placement.policy import place
from tests.placement.builders import request, session_at, view, worker

DEFAULTS = PlacementSettings()


def placed(
    *views: WorkerView, asks: PlacementRequest | None = None, hints: Hints | None = None,
    rules: PlacementSettings = DEFAULTS,
) -> str:
    """`"relay p0>d0"`, `"local d0"`, `"relay p0>"` (no decode), or `"nobody"`."""
    return shown(place(asks or request(), Snapshot(views), hints or Hints(), rules))


def shown(placement: Placement | None) -> str:
    if placement is None:
        return "nobody"
    assert placement.reason
    decode = placement.decode.worker_id if placement.decode else ""
    if placement.mode is Mode.LOCAL:
        assert placement.prefill is None
        return f"local {decode}"
    assert placement.prefill is not None
    return f"relay {placement.prefill.worker_id}>{decode}"


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        pytest.param([view("p0"), view("d0")], "relay p0>d0", id="a pair relays"),
        pytest.param([view("d0")], "local d0", id="no prefill worker"),
        pytest.param([view("m0")], "local m0", id="a mixed worker alone"),
        pytest.param([view("p0"), view("m0")], "local m0", id="a mixed worker computes its own prompts"),
        pytest.param([view("p0")], "nobody", id="no decode worker"),
        pytest.param([], "nobody", id="no worker"),
        pytest.param([view("p0"), view("d0", attached=False)], "nobody", id="decode not attached"),
        pytest.param([view("p0", attached=False), view("d0")], "local d0", id="prefill not attached"),
        pytest.param([view("p0"), view("d0", draining=True), view("d1")], "relay p0>d1", id="decode drains"),
        pytest.param([view("p0", draining=True), view("d0")], "local d0", id="prefill drains"),
        pytest.param([view("p0"), view("d0", engine_age_ms=60_000.0), view("d1")], "relay p0>d1", id="decode stuck"),
        pytest.param([view("p0"), view("d0", engine_age_ms=6e4, step_ms=2e4)], "relay p0>d0", id="slow steps"),
        pytest.param([view("p0"), view("d0", num_free=3)], "nobody", id="no room"),
        pytest.param([view("p0"), view("d0", num_free=3, num_cached=200)], "relay p0>d0", id="cached blocks are room"),
        pytest.param([view("p0"), view("d0", max_context=100)], "nobody", id="prompt and one token exceed the context"),
        pytest.param([view("p0"), view("d0", max_context=101)], "relay p0>d0", id="just fits the context"),
        pytest.param([view("p0", model="x"), view("d0")], "local d0", id="another identity is never paired"),
        pytest.param(
            [view("p0", model="x"), view("p1"), view("d0", model="x", num_free=0), view("d1")], "relay p1>d1",
            id="two models: the one with room",
        ),
        pytest.param([view("p0", waiting_tokens=900), view("p1"), view("d0")], "relay p1>d0", id="shorter queue"),
        pytest.param([view("p0"), view("d0", num_running=8), view("d1")], "relay p0>d1", id="fewer streams"),
        pytest.param([view("p0", waiting_tokens=5_000), view("d0")], "local d0", id="long queue: local"),
        pytest.param(
            [view("p0", waiting_tokens=500), view("d0", num_running=20)], "relay p0>d0", id="a stall costs every stream"
        ),
        pytest.param([view("p1"), view("p0"), view("d1"), view("d0")], "relay p0>d0", id="ties go to the smaller id"),
    ],
)
def test_place(views: list[WorkerView], expected: str) -> None:
    assert placed(*views) == expected


def test_one_token_needs_no_decode_worker() -> None:
    asks = request(max_tokens=1)
    assert placed(view("p0"), view("d0"), asks=asks) == "relay p0>"
    assert placed(view("p0"), asks=asks) == "relay p0>"
    assert placed(view("d0"), asks=asks) == "local d0"


def test_one_token_after_the_only_prefill_worker_failed() -> None:
    asks = request(max_tokens=1, excluded=frozenset({WorkerId("p0")}))
    assert placed(view("p0"), view("d0"), asks=asks) == "local d0"
    assert placed(view("p0"), asks=asks) == "relay p0>"


def test_a_replay_needs_no_room_but_prefers_it() -> None:
    asks = request(replay=True)
    assert placed(view("p0"), view("d0", num_free=0), asks=asks) == "relay p0>d0"
    assert placed(view("p0"), view("d0", num_free=0), view("d1", num_running=30), asks=asks) == "relay p0>d1"


def test_excluded_workers_are_the_last_resort() -> None:
    asks = request(excluded=frozenset({WorkerId("d0"), WorkerId("p0")}))
    assert placed(view("p0"), view("d0"), view("d1", num_running=50), asks=asks) == "local d1"
    assert placed(view("p0"), view("d0"), asks=asks) == "local d0"
    assert placed(view("p0"), view("p1"), view("d0"), view("d1"), asks=asks) == "relay p1>d1"


def test_exact_workers_pair_with_their_own_kind_only() -> None:
    amx, avx = view("p0", numerics="amx"), view("d0", numerics="avx")
    assert placed(amx, avx) == "local d0"
    assert placed(amx, avx, view("p1", numerics="avx")) == "relay p1>d0"
    assert placed(amx, view("d1")) == "local d1", "nor with one that promises nothing"


def test_a_stream_keeps_its_arithmetic_while_a_worker_has_it() -> None:
    amx, avx = view("d1", numerics="amx", num_running=60), view("d0", numerics="avx")
    replay = request(replay=True, numerics="amx")
    assert placed(amx, avx, asks=replay) == "local d1"
    assert placed(avx, asks=replay) == "local d0", "a stream that goes on is worth more than its bits"


def test_a_session_stays_where_its_kv_is() -> None:
    d1 = view("d1", num_running=2)
    hints = Hints(session=session_at(d1.record, num_tokens=992))
    assert placed(view("p0"), view("d0"), d1, asks=request(1_000), hints=hints) == "local d1"
    restarted = worker("d1", incarnation="d1-2")
    gone = Hints(session=session_at(restarted, num_tokens=992))
    assert placed(view("p0"), view("d0"), d1, asks=request(1_000), hints=gone) == "relay p0>d0"


def test_prefix_holders_score() -> None:
    hints = Hints(prefix_holders={WorkerId("p1"): 60})
    assert placed(view("p0"), view("p1"), view("d0"), asks=request(1_000), hints=hints) == "relay p1>d0"


def test_short_uncached_prompts_stay_local_if_asked_to() -> None:
    rules = PlacementSettings(local_below_tokens=101)
    assert placed(view("p0"), view("d0"), rules=rules) == "local d0"
    assert placed(view("p0"), view("d0"), asks=request(101), rules=rules) == "relay p0>d0"


def test_always_relay_leaves_local_to_the_case_of_no_prefill() -> None:
    busy = view("p0", waiting_tokens=100_000)
    always = PlacementSettings(always_relay=True)
    assert placed(busy, view("d0")) == "local d0"
    assert placed(busy, view("d0"), rules=always) == "relay p0>d0"
    assert placed(view("d0"), rules=always) == "local d0"
    failed = request(excluded=frozenset({WorkerId("p0")}))
    assert placed(busy, view("d0"), asks=failed, rules=always) == "local d0"


def test_hints_about_strangers_change_nothing() -> None:
    hints = Hints(session=session_at(worker("d9")), prefix_holders={WorkerId("p9"): 5})
    assert placed(view("p0"), view("d0"), hints=hints) == "relay p0>d0"


LOADS = st.builds(
    Load,
    num_blocks=st.just(256),
    num_free=st.integers(0, 256),
    num_cached=st.integers(0, 64),
    num_held=st.integers(0, 256),
    num_running=st.integers(0, 64),
    num_reserved=st.integers(0, 8),
    waiting_tokens=st.integers(0, 10_000),
    prefill_tokens_per_s=st.sampled_from([0.0, 100.0, 5_000.0]),
    step_ms=st.sampled_from([0.0, 20.0]),
    engine_age_ms=st.sampled_from([0.0, 500.0, 100_000.0]),
    draining=st.booleans(),
)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    views = []
    for index in range(draw(st.integers(0, 7))):
        name = f"{draw(st.sampled_from('pdm'))}{index}"
        record = worker(name, model=draw(st.sampled_from("xy")), max_context=draw(st.sampled_from([64, 4_096])))
        views.append(WorkerView(record, draw(LOADS), draw(st.booleans())))
    return Snapshot(tuple(views))


NAMES = st.sampled_from([f"{letter}{index}" for letter in "pdm" for index in range(7)]).map(WorkerId)
REQUESTS = st.builds(
    PlacementRequest,
    num_tokens=st.integers(1, 5_000),
    num_blocks=st.integers(1, 300),
    max_tokens=st.integers(1, 100),
    excluded=st.frozensets(NAMES, max_size=4),
    replay=st.booleans(),
)
HINTS = st.builds(Hints, session=st.none(), prefix_holders=st.dictionaries(NAMES, st.integers(0, 400), max_size=4))


@given(snapshots(), REQUESTS, HINTS, st.integers(0, 1_000))
@settings(max_examples=200, deadline=None)
def test_whatever_is_chosen_can_take_it(snapshot: Snapshot, asks: PlacementRequest, hints: Hints, seed: int) -> None:
    placement = place(asks, snapshot, hints, DEFAULTS)
    shuffled = list(snapshot.workers)
    random.Random(seed).shuffle(shuffled)
    assert place(asks, Snapshot(tuple(shuffled)), hints, DEFAULTS) == placement
    if placement is None:
        return
    views = {item.record.worker_id: item for item in snapshot.workers}
    chosen = [record for record in (placement.prefill, placement.decode) if record is not None]
    assert chosen
    for record in chosen:
        item = views[record.worker_id]
        assert item.attached
        assert not item.load.draining
        assert item.load.engine_age_ms < 10_000
        assert asks.num_tokens < record.max_context
    if placement.decode is not None:
        assert placement.decode.role.can_decode
        assert asks.replay or views[placement.decode.worker_id].load.num_available >= asks.num_blocks
    if len(chosen) == 2:
        assert chosen[0].identity == chosen[1].identity
        assert chosen[0].role is Role.PREFILL


@given(snapshots(), REQUESTS, HINTS)
@settings(max_examples=100, deadline=None)
def test_an_excluded_decode_worker_only_if_all_are(snapshot: Snapshot, asks: PlacementRequest, hints: Hints) -> None:
    placement = place(asks, snapshot, hints, DEFAULTS)
    if placement is None or placement.decode is None or placement.decode.worker_id not in asks.excluded:
        return
    rest = tuple(item for item in snapshot.workers if item.record.worker_id not in asks.excluded)
    alone = place(asks, Snapshot(rest), hints, DEFAULTS)
    assert alone is None or alone.decode is None


def test_a_promised_output_goes_to_a_worker_with_that_much_context() -> None:
    short, long = view("d0", max_context=150), view("d1", max_context=1_000, num_free=100)
    promised = request(100, reach=400)
    assert placed(short, long, asks=promised) == "local d1"
    assert placed(short, long, asks=request(100)) == "local d0", "nothing was promised"
    assert placed(short, long, asks=request(100, reach=120)) == "local d0"
    assert placed(short, asks=promised) == "local d0", "nobody has more"
    full = view("d1", max_context=1_000, num_free=0)
    assert placed(short, full, asks=promised) == "nobody", "it waits for room there"
    failed = request(100, reach=400, excluded=frozenset({WorkerId("d1")}))
    assert placed(short, long, asks=failed) == "local d0"


def test_what_lacks_only_its_end_fits_where_not_one_more_token_would() -> None:
    full = view("d0", max_context=100)
    assert placed(full, asks=request(100, max_tokens=0)) == "local d0"
    assert placed(full, asks=request(100, max_tokens=5)) == "nobody"
