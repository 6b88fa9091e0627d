"""Statistics of measurements: pure functions.

A percentile interpolates between the two nearest measurements (numpy's default), so that p50 of two is their mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

PERCENTILES = (50, 95, 99)


def percentile(values: Sequence[float], q: float) -> float:
    """`q` in percent. Raises ValueError without values."""
    if not values:
        raise ValueError("a percentile of nothing")
    if not 0 <= q <= 100:
        raise ValueError(f"{q} is no percentile")
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """`{count, mean, p50, p95, p99, max}`; the numbers are None without values."""
    if not values:
        return {"count": 0, "mean": None, **{f"p{q}": None for q in PERCENTILES}, "max": None}
    return {
        "count": len(values),
        "mean": sum(values) / len(values),
        **{f"p{q}": percentile(values, q) for q in PERCENTILES},
        "max": max(values),
    }


def rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def ratio_to_best(ours: float, peers: Mapping[str, float]) -> float | None:
    """Ours over the fastest peer; None if there is none."""
    best = max(peers.values(), default=0.0)
    return ours / best if best > 0 else None


def cumulative(values: Sequence[float], num_points: int = 200) -> list[tuple[float, float]]:
    """Points (value, share of values at or below it) of the distribution, at most `num_points`, for a plot."""
    ordered = sorted(values)
    if not ordered:
        return []
    step = max(1, len(ordered) // num_points)
    places = [*range(0, len(ordered) - 1, step), len(ordered) - 1]
    return [(ordered[place], (place + 1) / len(ordered)) for place in places]
