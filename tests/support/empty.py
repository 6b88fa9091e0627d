"""How every story about a worker ends."""

from __future__ import annotations

from kvrelay.engine.engine import Engine


def assert_worker_is_empty(engine: Engine) -> None:
    """No sequence, no reservation, no open transfer, and every block is free or an unreferenced cached one."""
    work, pool = engine.work, engine.cache.pool
    assert not work.by_key, f"sequences left: {[str(key) for key in work.by_key]}"
    assert not work.running
    assert not len(work.waiting)
    assert not len(work.reservations), "a reservation is left"
    assert not len(work.sendings), "a sending transfer is left"
    pool.check()
    assert pool.num_free + pool.num_cached == pool.num_blocks
