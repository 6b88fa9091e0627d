"""When requests are sent: fixed before the first one is, whatever the server does (open loop).

A closed loop waits for answers before it asks again, so a slow server is asked less and looks better than it is
("coordinated omission"). Here a request has its scheduled time, and every latency counts from that time, also when
the load generator itself was late.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvrelay_loadtest.trace import TraceRow


def poisson(rate: float, count: int, seed: int = 0) -> list[float]:
    """Seconds of `count` arrivals of a Poisson process, from the first one at 0."""
    source = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += source.expovariate(rate)
    return times


def constant(rate: float, count: int) -> list[float]:
    return [number / rate for number in range(count)]


def replay(rows: Sequence[TraceRow]) -> list[float]:
    """The trace's own times: `trace.scale` has already changed their rate."""
    return [row.at_s for row in rows]


def offered_rate(times: Sequence[float]) -> float:
    """Requests per second of a schedule."""
    return (len(times) - 1) / times[-1] if len(times) > 1 and times[-1] > 0 else 0.0
