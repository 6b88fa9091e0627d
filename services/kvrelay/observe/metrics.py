"""Every number a process publishes, behind methods named after what happened.

One `CollectorRegistry` per process. Labels take values from closed sets only: whatever comes from a request (a path,
a model name) ends in one bucket, so that no client can grow the number of series (MET-01).
"""

from __future__ import annotations

import errno
import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from kvrelay.core.errors import ConfigError
from kvrelay.core.placement import Load
from kvrelay.observe.token_flow import TokenFlow

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 600)
"""Up to the default deadline: a request that waited for ten minutes still lands in a bucket."""
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5, 10, 30, 120)
OTHER = "other"
ENDPOINTS = frozenset(
    {"chat", "completions", "models", "tokenize", "detokenize", "health", "grpc_generate", "grpc_chat", "grpc_models",
     "grpc_tokenize", "grpc_detokenize"}
)
OUTCOMES = frozenset(
    {"ok", "cancelled", "rejected", "overloaded", "unavailable", "deadline", "broken"}
)
REASONS = frozenset(
    {"preempted", "transfer", "engine", "link", "refused", "stall", "deadline", "nan_logits", "cancelled", "draining"}
)
TRANSFER_OUTCOMES = frozenset({"committed", "failed"})


def bounded(value: str, known: frozenset[str]) -> str:
    """`value` if it is one of ours, else "other"."""
    return value if value in known else OTHER


class _RedisMetrics:
    """What the breaker in front of Redis reports. Part of both processes' metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._open = Gauge("kvrelay_redis_breaker_open", "1 while Redis is not asked", registry=registry)
        self._redis_failures = Counter("kvrelay_redis_failures", "Calls that failed or timed out", registry=registry)
        self._dropped = Counter("kvrelay_redis_dropped", "Redis calls skipped or lost", ["kind"], registry=registry)

    def redis_breaker(self, is_open: bool) -> None:
        self._open.set(1 if is_open else 0)

    def redis_failed(self) -> None:
        self._redis_failures.inc()

    def redis_dropped(self, kind: str) -> None:
        """`kind`: "lookup" or "write"."""
        self._dropped.labels(bounded(kind, frozenset({"lookup", "write"}))).inc()


class RouterMetrics(_RedisMetrics):
    """The front door's numbers."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        super().__init__(self.registry)
        at = self.registry
        self._requests = Counter("kvrelay_requests", "Requests ended", ["endpoint", "outcome"], registry=at)
        self._inflight = Gauge("kvrelay_requests_inflight", "Requests under way", registry=at)
        self._ttft = Histogram("kvrelay_ttft_seconds", "Accepted to first token", buckets=SECONDS, registry=at)
        self._flow = TokenFlow(at, SECONDS)
        self._e2e = Histogram("kvrelay_e2e_seconds", "Accepted to ended", ["endpoint"], buckets=SECONDS, registry=at)
        self._queue = Histogram("kvrelay_queue_seconds", "Accepted to placed", buckets=SECONDS, registry=at)
        self._prompt_tokens = Counter("kvrelay_prompt_tokens", "Prompt tokens of requests that ran", registry=at)
        self._cached_tokens = Counter("kvrelay_cached_tokens", "Prompt tokens found cached", registry=at)
        self._placements = Counter("kvrelay_placements", "Attempts placed", ["mode"], registry=at)
        self._inexact = Counter(
            "kvrelay_inexact_replays", "Streams that went on in another arithmetic, for want of a worker", registry=at
        )
        self._replays = Counter("kvrelay_replays", "Attempts after the first", ["reason"], registry=at)
        self._moves = Counter("kvrelay_migrations", "Running choices that went on elsewhere with their KV", registry=at)
        self._unhidden = Histogram(
            "kvrelay_transfer_unhidden_seconds", "First token to committed", buckets=SECONDS, registry=at
        )
        self._workers = Gauge("kvrelay_workers_attached", "Workers attached to this router", ["role"], registry=at)

    def request_accepted(self) -> None:
        self._inflight.inc()

    def request_ended(self, endpoint: str, outcome: str, e2e_s: float, *, was_accepted: bool = True) -> None:
        """Once per request. `was_accepted`: `request_accepted` was called for it."""
        endpoint = bounded(endpoint, ENDPOINTS)
        self._requests.labels(endpoint, bounded(outcome, OUTCOMES)).inc()
        if was_accepted:
            self._inflight.dec()
            self._e2e.labels(endpoint).observe(e2e_s)

    def request_placed(self, mode: str, queue_s: float) -> None:
        self._placements.labels(bounded(mode, frozenset({"relay", "local"}))).inc()
        self._queue.observe(queue_s)

    def request_replayed(self, reason: str) -> None:
        self._replays.labels(bounded(reason, REASONS)).inc()

    def went_on_inexactly(self) -> None:
        self._inexact.inc()

    def request_moved(self) -> None:
        self._moves.inc()

    def first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def tokens_emitted(self, num_tokens: int, since_last_s: float | None = None) -> None:
        """`since_last_s`: time since the choice's previous token; absent for its first."""
        between_s = since_last_s / num_tokens if since_last_s is not None and num_tokens > 0 else None
        self._flow.emitted(num_tokens, between_s)

    def prompt_counted(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        self._prompt_tokens.inc(num_prompt_tokens)
        self._cached_tokens.inc(num_cached_tokens)

    def handoff_committed(self, unhidden_s: float) -> None:
        self._unhidden.observe(max(0.0, unhidden_s))

    def workers_attached(self, role: str, count: int) -> None:
        self._workers.labels(bounded(role, frozenset({"prefill", "decode", "mixed"}))).set(count)


class WorkerMetrics(_RedisMetrics):
    """A prefill or decode process's numbers. `load_reported` carries most of them."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        super().__init__(self.registry)
        at = self.registry
        self._blocks = Gauge("kvrelay_kv_blocks", "KV blocks by state; they add up to the pool", ["state"], registry=at)
        self._sequences = Gauge("kvrelay_sequences", "Sequences by state", ["state"], registry=at)
        self._waiting_tokens = Gauge("kvrelay_waiting_tokens", "Prompt tokens not yet computed", registry=at)
        self._rate = Gauge("kvrelay_prefill_tokens_per_second", "Measured prefill speed", registry=at)
        self._age = Gauge("kvrelay_engine_age_seconds", "Since the engine last moved", registry=at)
        self._draining = Gauge("kvrelay_draining", "1 while the worker drains", registry=at)
        self._steps = Histogram("kvrelay_step_seconds", "Engine steps", buckets=STEP_SECONDS, registry=at)
        self._step_tokens = Counter("kvrelay_computed_tokens", "Tokens computed by the engine", registry=at)
        self._preemptions = Counter("kvrelay_preemptions", "Sequences that found no block to grow", registry=at)
        self._failures = Counter("kvrelay_sequence_failures", "Sequences that failed", ["reason"], registry=at)
        self._transfers = Counter("kvrelay_transfers", "Pushes ended", ["direction", "outcome"], registry=at)
        self._transfer_bytes = Counter("kvrelay_transfer_bytes", "KV bytes moved", ["direction"], registry=at)
        self._transfer_seconds = Histogram(
            "kvrelay_transfer_seconds", "Push opened to ended", ["direction"], buckets=SECONDS, registry=at
        )
        self._links = Gauge("kvrelay_routers_attached", "Attach streams open", registry=at)

    def load_reported(self, load: Load) -> None:
        for state in ("free", "cached", "held", "draining"):
            self._blocks.labels(state).set(getattr(load, f"num_{state}"))
        for state in ("running", "waiting", "reserved", "sending"):
            self._sequences.labels(state).set(getattr(load, f"num_{state}"))
        self._waiting_tokens.set(load.waiting_tokens)
        self._rate.set(load.prefill_tokens_per_s)
        self._age.set(load.engine_age_ms / 1_000)
        self._draining.set(1 if load.draining else 0)

    def step_completed(self, seconds: float, num_tokens: int) -> None:
        self._steps.observe(seconds)
        self._step_tokens.inc(num_tokens)

    def sequence_preempted(self) -> None:
        self._preemptions.inc()

    def sequence_failed(self, reason: str) -> None:
        self._failures.labels(bounded(reason, REASONS)).inc()

    def transfer_ended(self, direction: str, outcome: str, num_bytes: int, seconds: float) -> None:
        """`direction`: "out" or "in"."""
        direction = bounded(direction, frozenset({"in", "out"}))
        self._transfers.labels(direction, bounded(outcome, TRANSFER_OUTCOMES)).inc()
        self._transfer_bytes.labels(direction).inc(num_bytes)
        self._transfer_seconds.labels(direction).observe(seconds)

    def routers_attached(self, count: int) -> None:
        self._links.set(count)


class MetricsServer:
    """`/metrics` on its own port and threads. Owned by whoever called `serve_metrics`."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread
        self.port: int = server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


def serve_metrics(host: str, port: int, registry: CollectorRegistry) -> MetricsServer:
    """Raises ConfigError that names the flag if the port is taken. Port 0 picks a free one."""
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise ConfigError(f"metrics port {host}:{port}: {error.strerror}; choose with --metrics-port") from error
        raise
    return MetricsServer(server, thread)
