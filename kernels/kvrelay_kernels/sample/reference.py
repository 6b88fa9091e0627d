"""Choose a token from a row of logits: the largest, or an inverse CDF at a given uniform number.

    w_i = exp((l_i − l_max) / temperature), sorted descending, equal weights by ascending id
    kept: a prefix, the shortest of      top_k entries
                                         the first entries whose sum reaches top_p of the sum of the top_k
                                         the entries with w_i ≥ min_p
    token: the first whose cumulative weight exceeds uniform · (sum of the kept)

No state and no neighbours: a row's token depends on its logits and its own numbers alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [rows, vocab] → (largest value [rows], its id [rows]). NaN and infinities show in the value."""
    values, ids = torch.max(logits, dim=-1)
    return values, ids


def draw(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """logits [vocab] float32, finite or -inf, with a finite maximum. top_k 0: off. uniform in [0, 1)."""
    ordered, ids = torch.sort(logits, descending=True, stable=True)
    weights = torch.exp((ordered.double() - ordered[0].double()) / temperature)
    return int(ids[pick(weights, total(weights), top_k, top_p, min_p, uniform)])


def total(weights: Tensor) -> float:
    """Summed in order: `sum` splits a long row by the number of threads, and its last bits with it."""
    return float(torch.cumsum(weights, dim=0)[-1])


def pick(weights: Tensor, total: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """Where in the descending `weights` (float64, all of them) the draw falls. `total` is their sum."""
    cumulative = torch.cumsum(weights, dim=0)
    kept = len(weights)
    if 0 < top_k < kept:
        kept, total = top_k, float(cumulative[top_k - 1])
    if top_p < 1.0:
        kept = min(kept, int(torch.searchsorted(cumulative, top_p * total)) + 1)
    if min_p > 0.0:
        kept = min(kept, int((weights >= min_p).sum()))
    kept = max(1, min(kept, int((weights > 0.0).sum())))
    target = uniform * float(cumulative[kept - 1])
    return min(int(torch.searchsorted(cumulative, target, right=True)), kept - 1)
