"""The same token as the reference, mostly without sorting the vocabulary.

Everything that is kept and drawn is a prefix of the sorted row, and it usually lies within the few hundred largest,
nearly always within the few thousand. If it does not, or equal logits straddle that edge, the whole row is sorted.
Measured at 49,152 ids: 0.3 ms from 256, 5 ms from the whole row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvrelay_kernels.sample import reference

HEADS = (256, 4096)
"""How many of the largest logits are tried before the whole row is sorted."""

greedy = reference.greedy


def draw(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    for size in HEADS:
        if logits.shape[0] > 2 * size:
            token = _draw_from_head(logits, size, temperature, top_k, top_p, min_p, uniform)
            if token is not None:
                return token
    return reference.draw(logits, temperature, top_k, top_p, min_p, uniform)


def _draw_from_head(
    logits: Tensor, size: int, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int | None:
    """None if the `size` largest logits do not decide it."""
    values, ids = torch.topk(logits, size)
    surely = int((values > values[-1]).sum())  # ids equal to the last one may be missing: leave them all out
    if surely == 0:
        return None
    order = torch.sort(ids[:surely]).indices
    values, ids = values[:surely][order], ids[:surely][order]
    values, order = torch.sort(values, descending=True, stable=True)
    weights = torch.exp((values.double() - values[0].double()) / temperature)
    cumulative = torch.cumsum(weights, dim=0)
    if 0 < top_k <= surely:
        return int(ids[order[reference.pick(weights, 0.0, top_k, top_p, min_p, uniform)]])
    if top_k > 0:
        return None  # the sum of the top_k is not known here
    total = reference.total(torch.exp((logits.double() - values[0].double()) / temperature))
    reached = float(cumulative[-1])
    whole_prefix = (top_p < 1.0 and top_p * total <= reached) or (min_p > 0.0 and float(weights[-1]) < min_p)
    if whole_prefix:
        return int(ids[order[reference.pick(weights, total, 0, top_p, min_p, uniform)]])
    if top_p >= 1.0 and min_p <= 0.0 and uniform * total < reached:
        return int(ids[order[int(torch.searchsorted(cumulative, uniform * total, right=True))]])
    return None
