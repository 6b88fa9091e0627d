"""Block tables: matching, growing, forking, registering, and what eviction leaves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.core.ids import TokenId
from kvrelay.core.kv import blocks_for
from kvrelay.kvcache.cache import BlockTable, KvCache

LENGTHS = [1, 15, 16, 17, 31, 32, 33]


def tokens(count: int, first: int = 0) -> list[TokenId]:
    return [TokenId(first + i) for i in range(count)]


def new_cache(num_blocks: int = 16, block_size: int = 16) -> KvCache:
    return KvCache(num_blocks, block_size, "model", "float32")


def run_through(cache: KvCache, prompt: list[TokenId], salt: bytes = b"") -> int:
    """Allocate, compute, release. Returns how much was cached."""
    table = cache.new_table(prompt, salt)
    num_cached = cache.allocate(table, len(prompt))
    assert num_cached is not None
    cache.register(table, prompt, len(prompt))
    cache.release(table)
    cache.pool.check()
    return num_cached


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("length", LENGTHS)
def test_at_least_one_token_is_computed_again_KVC_01(length: int, block_size: int) -> None:
    cache = new_cache(64, block_size)
    assert run_through(cache, tokens(length)) == 0
    assert run_through(cache, tokens(length)) == (length - 1) // block_size * block_size


def test_a_block_is_matched_only_after_it_was_computed_KVC_04() -> None:
    cache = new_cache()
    prompt = tokens(40)
    first, second, third = (cache.new_table(prompt, b"") for _ in range(3))
    assert cache.allocate(first, 40) == 0
    cache.register(first, prompt, 15)
    assert cache.allocate(second, 40) == 0
    cache.register(first, prompt, 16)
    assert cache.allocate(third, 40) == 16
    assert third.blocks[0] == first.blocks[0]


def test_tenants_do_not_meet_KVC_02() -> None:
    cache = new_cache()
    run_through(cache, tokens(64), b"a")
    assert run_through(cache, tokens(64), b"b") == 0
    assert run_through(cache, tokens(64), b"a") == 48


def test_two_sequences_of_one_content_keep_their_own_blocks() -> None:
    cache = new_cache()
    prompt = tokens(33)
    first, second = cache.new_table(prompt, b""), cache.new_table(prompt, b"")
    cache.allocate(first, 33)
    cache.allocate(second, 33)
    cache.register(first, prompt, 33)
    cache.register(second, prompt, 33)
    assert not set(first.blocks) & set(second.blocks)
    cache.release(first)
    cache.release(second)
    cache.pool.check()
    assert cache.pool.num_cached == 2
    assert cache.pool.num_available == 16


def test_allocation_leaves_what_it_is_told_to_leave() -> None:
    cache = new_cache(4)
    table = cache.new_table(tokens(33), b"")
    assert cache.allocate(table, 33, leave=2) is None
    assert cache.pool.num_free == 4
    assert cache.allocate(table, 33, leave=1) == 0


def test_matched_blocks_are_not_counted_twice_as_available() -> None:
    cache = new_cache(4)
    run_through(cache, tokens(49))
    table = cache.new_table(tokens(65), b"")
    assert cache.allocate(table, 65) is None
    cache.pool.check()
    assert cache.allocate(cache.new_table(tokens(64), b""), 64) == 48


def test_growth_takes_the_spare_blocks_first() -> None:
    cache = new_cache(3)
    table = cache.new_table(tokens(16), b"")
    cache.allocate(table, 16, num_spare=1)
    other = cache.pool.allocate(1) or []
    assert cache.prepare(table, 16, 17) == ()
    assert table.spare == []
    assert cache.prepare(table, 32, 33) is None
    cache.pool.free(other)
    assert cache.prepare(table, 32, 33) == ()


def test_a_fork_copies_the_partial_block_when_it_writes() -> None:
    cache = new_cache()
    table = cache.new_table(tokens(20), b"")
    cache.allocate(table, 20, num_spare=3)
    child = cache.fork(table, 2)
    assert (len(table.spare), len(child.spare)) == (1, 2)
    shared = child.blocks[1]
    copies = cache.prepare(child, 20, 21)
    assert copies is not None
    assert [(copy.source, copy.target) for copy in copies] == [(shared, child.blocks[1])]
    assert cache.prepare(table, 20, 21) == ()
    assert table.blocks[1] == shared
    assert table.blocks[0] == child.blocks[0]
    cache.release(table)
    cache.release(child)
    cache.pool.check()
    assert cache.pool.num_free == 16


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    cache = new_cache()
    table = cache.new_table(tokens(32), b"")
    cache.allocate(table, 32)
    child = cache.fork(table, 0)
    assert cache.prepare(child, 32, 33) == ()
    assert cache.prepare(table, 32, 33) == ()
    assert child.blocks[2] != table.blocks[2]


def test_a_parent_outlives_its_child_in_the_cache() -> None:
    """Even where the child's own sequence held only unnamed twins of the parents."""
    cache = new_cache(8)
    short, long = tokens(32), tokens(48)
    first, second = cache.new_table(short, b""), cache.new_table(long, b"")
    cache.allocate(first, 32)
    cache.allocate(second, 48)
    cache.register(first, short, 32)
    cache.register(second, long, 48)
    cache.release(first)
    cache.release(second)
    assert cache.pool.num_cached == 3
    cache.pool.allocate(cache.pool.num_free + 1)
    assert cache.pool.index.find(second.hashes[2]) is None
    assert all(cache.pool.index.find(content) is not None for content in first.hashes)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.booleans()), max_size=40))
def test_no_child_is_cached_without_its_parents(rounds: list[tuple[int, int, bool]]) -> None:
    cache = new_cache(num_blocks=12, block_size=4)
    held: list[tuple[BlockTable, list[TokenId]]] = []
    for family, length, keep in rounds:
        prompt = [TokenId(family)] * 4 + tokens(length)
        table = cache.new_table(prompt, b"")
        if cache.allocate(table, len(prompt)) is not None:
            cache.register(table, prompt, len(prompt))
            assert len(table.blocks) == blocks_for(len(prompt), 4)
            if keep:
                held.append((table, prompt))
            else:
                cache.release(table)
        elif held:
            cache.release(held.pop(0)[0])
        cache.pool.check()
        for resting in range(4):
            contents = cache.new_table([TokenId(resting)] * 4 + tokens(40), b"").hashes
            known = [cache.pool.index.find(content) for content in contents]
            cached = [block is not None and cache.pool.is_cached(block) for block in known]
            last = max((i for i, is_cached in enumerate(cached) if is_cached), default=-1)
            assert held or None not in known[: last + 1]
    for table, _ in held:
        cache.release(table)
    assert cache.pool.num_available == 12
