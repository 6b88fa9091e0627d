"""The snapshot's correction for what was sent but not reported yet."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.placement import Load
from kvrelay.router.pending import Pending

SIZES = st.integers(0, 40)


@given(SIZES, SIZES, SIZES, SIZES, st.lists(st.tuples(SIZES, SIZES), max_size=6))
def test_blocks_always_add_up(free: int, cached: int, held: int, draining: int, sent: list[tuple[int, int]]) -> None:
    load = Load(
        num_blocks=free + cached + held + draining, num_free=free, num_cached=cached, num_held=held,
        num_draining=draining,
    )
    pending = Pending()
    for key, (num_blocks, num_tokens) in enumerate(sent):
        pending.add(key, num_blocks, num_tokens)
    seen = pending.applied_to(load)
    assert seen.num_free + seen.num_cached + seen.num_held + seen.num_draining == load.num_blocks
    assert seen.num_available == max(0, load.num_available - sum(num_blocks for num_blocks, _ in sent))
    assert seen.waiting_tokens == sum(num_tokens for _, num_tokens in sent)


def test_a_start_counts_until_the_second_report_after_it() -> None:
    load, pending = Load(num_blocks=10, num_free=10), Pending()
    pending.add("a", 4, 20)
    pending.reported()
    assert pending.applied_to(load).num_free == 6
    pending.reported()
    assert pending.applied_to(load) == load


def test_the_first_event_says_that_the_worker_knows() -> None:
    load, pending = Load(num_blocks=10, num_free=10), Pending()
    pending.add("a", 4, 20)
    pending.add("b", 4, 20)
    pending.drop("a")
    assert pending.applied_to(load).num_waiting == 1
