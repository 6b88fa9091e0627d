"""How far two models are apart on a text: logits at every token, Kullback-Leibler divergence, the likeliest token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from kvrelay.core.batch import Row, StepPlan
from kvrelay.core.ids import Attempt, BlockId, Choice, RequestId, SeqKey, TokenId
from kvrelay.core.kv import blocks_for
from kvrelay.core.request import SamplingParams
from kvrelay.model.load import LoadedModel
from kvrelay_loadtest.stats import percentile

SLICE = 64
"""Rows compared at once in double precision: 25 MB of a vocabulary of 49,152."""
SHORTEST = 16
"""Tokens: a shorter rest of a text is left out."""


class NotFinite(Exception):
    """A format whose logits are no numbers."""


@dataclass(frozen=True, slots=True)
class Drift:
    kl: tuple[float, ...]
    """Nats, one per token."""
    agreed: int
    """Tokens with the same likeliest successor."""

    @classmethod
    def total(cls, parts: Iterable[Drift]) -> Drift:
        found = list(parts)
        return cls(tuple(value for part in found for value in part.kl), sum(part.agreed for part in found))

    @property
    def count(self) -> int:
        return len(self.kl)

    @property
    def mean(self) -> float:
        return sum(self.kl) / self.count

    @property
    def p99(self) -> float:
        return percentile(self.kl, 99)

    @property
    def top1(self) -> float:
        return self.agreed / self.count


def windows_of(texts: Iterable[Sequence[int]], size: int, most: int) -> list[list[int]]:
    """Token ids of texts, cut into windows of `size`, none across two texts; `most` tokens in all.

    The first windows of all texts go before the second ones: a short sample is a bit of everything.
    """
    windows: list[list[int]] = []
    cut = [[ids[begin : begin + size] for begin in range(0, len(ids), size)] for ids in texts]
    for window in (each for turn in zip_longest(*cut, fillvalue=()) for each in turn):
        kept = list(window[:most])
        if len(kept) >= SHORTEST:
            windows.append(kept)
            most -= len(kept)
    return windows


def every_logits(model: LoadedModel, window: Sequence[int], chunk: int) -> Tensor:
    """[tokens, known ids] float32: what follows each token of the window, computed `chunk` tokens at a time."""
    size = model.layout.block_size
    blocks = [BlockId(block) for block in range(1, 1 + blocks_for(len(window), size))]
    ids = [TokenId(token) for token in window]
    parts = []
    for begin in range(0, len(ids), chunk):
        row = Row(
            key=SeqKey(RequestId("text"), Choice(0), Attempt(0)), token_ids=ids, num_prompt=len(ids),
            num_computed=begin, num_scheduled=min(chunk, len(ids) - begin), block_table=blocks,
            sampling=SamplingParams(max_tokens=1), draws=(),
        )  # fmt: skip
        parts.append(model.runner.every_logits(StepPlan(0, (row,)))[:, : model.num_tokens])
    return torch.cat(parts)


def log_probabilities(logits: Tensor) -> Tensor:
    """Of the baseline, as `compare` wants them. Raises NotFinite."""
    return torch.cat([_log_softmax(rows).float() for rows in torch.split(logits, SLICE)])


def compare(log_p: Tensor, logits: Tensor) -> Drift:
    """The baseline's log-probabilities and another model's logits, both [tokens, ids]. Raises NotFinite."""
    kl: list[float] = []
    for wanted, given in zip(torch.split(log_p, SLICE), torch.split(logits, SLICE), strict=True):
        reference = wanted.double()
        kl += (reference.exp() * (reference - _log_softmax(given))).sum(-1).clamp(min=0.0).tolist()
    return Drift(tuple(kl), int((log_p.argmax(-1) == logits.argmax(-1)).sum()))


def _log_softmax(logits: Tensor) -> Tensor:
    if not bool(torch.isfinite(logits).all()):
        raise NotFinite("its logits are not finite")
    return torch.log_softmax(logits.double(), dim=-1)
