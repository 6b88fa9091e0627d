"""Output tokens and the time between them, counted for every token of every stream.

Plain numbers with one writer, the router's loop: no lock and no label is touched per token. They become metrics when
somebody looks, on whatever thread that is; what is read may be a token older than the rest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry


class TokenFlow(Collector):
    def __init__(self, registry: CollectorRegistry, buckets: Sequence[float]) -> None:
        """`buckets`: upper bounds in seconds, rising, without infinity."""
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum_s = 0.0
        self._num_tokens = 0
        registry.register(self)

    def emitted(self, num_tokens: int, between_s: float | None) -> None:
        self._num_tokens += num_tokens
        if between_s is not None:
            self._counts[bisect_left(self._bounds, between_s)] += 1
            self._sum_s += between_s

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("kvrelay_output_tokens", "Output tokens emitted", self._num_tokens)
        bounds = [*map(str, map(float, self._bounds)), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts[:]), strict=True))
        yield HistogramMetricFamily("kvrelay_itl_seconds", "Between output tokens", buckets, self._sum_s)
