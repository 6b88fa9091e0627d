"""The pool's books: every block in exactly one state, and nobody gets what somebody else may still touch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.core.errors import Broken
from kvrelay.core.ids import BlockHash, BlockId
from kvrelay.kvcache.pool import BlockPool


def name(text: str) -> BlockHash:
    return BlockHash(text.encode())


def counts(pool: BlockPool) -> tuple[int, int, int, int]:
    pool.check()
    return pool.num_free, pool.num_held, pool.num_cached, pool.num_draining


def test_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(5) is None
    assert counts(pool) == (4, 0, 0, 0)
    assert sorted(pool.allocate(4) or []) == [0, 1, 2, 3]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_a_shared_block_comes_back_with_its_last_reference() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1) or []
    pool.share(blocks)
    pool.free(blocks)
    assert counts(pool) == (1, 1, 0, 0)
    pool.free(blocks)
    assert counts(pool) == (2, 0, 0, 0)


def test_known_content_is_kept_until_it_is_evicted() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2) or []
    pool.index.register(name("a"), blocks[0])
    pool.free(blocks)
    assert counts(pool) == (1, 0, 1, 0)
    pool.share([blocks[0]])
    assert counts(pool) == (1, 1, 0, 0)
    pool.free([blocks[0]])
    pool.allocate(2)
    assert counts(pool) == (0, 2, 0, 0)
    assert pool.index.find(name("a")) is None


def test_the_least_recently_used_goes_first_and_tails_before_heads() -> None:
    pool = BlockPool(4)
    old, new = pool.allocate(2) or [], pool.allocate(2) or []
    for block in (*old, *new):
        pool.index.register(name(str(block)), block)
    pool.free(old)
    pool.free(new)
    assert [(pool.allocate(1) or [])[0] for _ in range(4)] == [old[1], old[0], new[1], new[0]]


def test_a_pinned_block_drains_before_it_is_free() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2) or []
    pool.pin(blocks)
    pool.free(blocks)
    assert counts(pool) == (0, 0, 0, 2)
    assert pool.allocate(1) is None
    pool.unpin(blocks)
    assert counts(pool) == (2, 0, 0, 0)


def test_a_draining_block_of_known_content_can_be_matched() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1) or []
    pool.index.register(name("a"), blocks[0])
    pool.pin(blocks)
    pool.free(blocks)
    pool.share(blocks)
    assert counts(pool) == (0, 1, 0, 0)
    pool.unpin(blocks)
    pool.free(blocks)
    assert counts(pool) == (0, 0, 1, 0)


def test_misuse_is_found() -> None:
    pool = BlockPool(2)
    with pytest.raises(Broken):
        pool.free([BlockId(0)])
    with pytest.raises(Broken):
        pool.share([BlockId(0)])
    with pytest.raises(Broken):
        pool.pin([BlockId(0)])
    with pytest.raises(Broken):
        pool.unpin([BlockId(0)])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("asfpun"), st.integers(0, 7)), max_size=60))
def test_whatever_happens_every_block_is_in_one_state(moves: list[tuple[str, int]]) -> None:
    """a: allocate, s: share, f: free, p: pin, u: unpin, n: name."""
    pool = BlockPool(6)
    held: list[BlockId] = []
    pinned: list[BlockId] = []
    for move, number in moves:
        if move == "a":
            held += pool.allocate(number % 3) or []
        elif move == "u" and pinned:
            pool.unpin([pinned.pop(number % len(pinned))])
        elif held:
            block = held[number % len(held)]
            if move == "s":
                pool.share([block])
                held.append(block)
            elif move == "f":
                held.remove(block)
                pool.free([block])
            elif move == "p":
                pool.pin([block])
                pinned.append(block)
            elif move == "n":
                pool.index.register(name(str(number)), block)
        assert sum(counts(pool)) == 6
        assert pool.num_held == len(set(held))
    pool.free(held)
    pool.unpin(pinned)
    assert pool.num_available == 6
