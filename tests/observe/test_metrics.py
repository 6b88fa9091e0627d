from __future__ import annotations

import errno
import socket
import urllib.request

import pytest

from kvrelay.core.errors import ConfigError
from kvrelay.core.placement import Load
from kvrelay.observe.metrics import RouterMetrics, WorkerMetrics, serve_metrics


def series(metrics: RouterMetrics | WorkerMetrics) -> int:
    return sum(len(family.samples) for family in metrics.registry.collect())


def test_labels_from_requests_end_in_one_bucket() -> None:
    """MET-01: two thousand made-up names add a handful of series."""
    metrics = RouterMetrics()
    metrics.request_accepted()
    metrics.request_ended("other", "other", 1.0)
    before = series(metrics)
    for index in range(2_000):
        metrics.request_ended(f"/v1/{index}", f"odd-{index}", 1.0, was_accepted=False)
        metrics.request_replayed(f"reason-{index}")
        metrics.request_placed(f"mode-{index}", 0.0)
        metrics.workers_attached(f"role-{index}", 1)
        metrics.redis_dropped(f"kind-{index}")
    assert series(metrics) - before <= 10


def test_a_request_adds_up() -> None:
    metrics = RouterMetrics()
    value = metrics.registry.get_sample_value
    metrics.request_accepted()
    metrics.request_placed("relay", 0.01)
    metrics.prompt_counted(100, 64)
    metrics.first_token(590.0)
    metrics.tokens_emitted(1)
    metrics.tokens_emitted(4, 0.2)
    metrics.handoff_committed(-0.1)
    assert value("kvrelay_requests_inflight") == 1
    metrics.request_ended("chat", "ok", 599.0)
    assert value("kvrelay_requests_inflight") == 0
    assert value("kvrelay_requests_total", {"endpoint": "chat", "outcome": "ok"}) == 1
    assert value("kvrelay_ttft_seconds_bucket", {"le": "600.0"}) == 1
    assert value("kvrelay_ttft_seconds_bucket", {"le": "320.0"}) == 0
    assert value("kvrelay_output_tokens_total") == 5
    assert value("kvrelay_cached_tokens_total") == 64
    assert value("kvrelay_itl_seconds_sum") == pytest.approx(0.05)
    assert value("kvrelay_transfer_unhidden_seconds_sum") == 0


def test_a_worker_shows_its_load() -> None:
    metrics = WorkerMetrics()
    value = metrics.registry.get_sample_value
    metrics.load_reported(Load(num_blocks=10, num_free=4, num_cached=3, num_held=2, num_draining=1, num_running=5))
    states = ("free", "cached", "held", "draining")
    assert sum(value("kvrelay_kv_blocks", {"state": state}) or 0 for state in states) == 10
    assert value("kvrelay_sequences", {"state": "running"}) == 5
    metrics.step_completed(0.02, 32)
    metrics.sequence_preempted()
    metrics.sequence_failed("nan_logits")
    metrics.transfer_ended("out", "committed", 1 << 20, 0.1)
    metrics.routers_attached(1)
    assert value("kvrelay_transfer_bytes_total", {"direction": "out"}) == 1 << 20
    assert value("kvrelay_computed_tokens_total") == 32


def test_metrics_are_served_until_closed() -> None:
    metrics = RouterMetrics()
    server = serve_metrics("127.0.0.1", 0, metrics.registry)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
        assert b"kvrelay_requests_inflight" in answer.read()
    with pytest.raises(ConfigError, match="--metrics-port"):
        serve_metrics("127.0.0.1", server.port, metrics.registry)
    server.close()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) == errno.ECONNREFUSED
