"""Logits to tokens. A row's result depends on its logits, its request and its index: never on its neighbours.

    raw logits ─▶ log-softmax (the logprobs the user sees)
        └─▶ bias ─▶ penalties ─▶ min_tokens mask ─▶ greedy, or temperature, top-k, top-p, min-p and the draw

The draw is an inverse CDF at hash(seed, choice, index): no generator, so any worker can continue any request.
Ids past the tokenizer's vocabulary exist in the head only as padding and are cut off before anything else.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from kvrelay.core.batch import Draw, Row, RowResult
from kvrelay.core.events import Token
from kvrelay.core.ids import TokenId
from kvrelay.core.request import SamplingParams
from kvrelay_kernels.dispatch import Ops


def uniform(seed: int, choice: int, index: int) -> float:
    """In [0, 1), 53 bits: the same on every machine and in every process."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, choice, index), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Sampler:
    def __init__(self, ops: Ops, num_tokens: int, eos_token_ids: frozenset[int]) -> None:
        """`num_tokens`: ids the tokenizer knows; larger ones are padding."""
        self._ops = ops
        self._num_tokens = num_tokens
        self._eos_token_ids = eos_token_ids

    def sample(self, rows: Sequence[Row], logits: Tensor) -> list[RowResult]:
        """`rows` draw something each; logits [rows, vocab] float32 of their last tokens."""
        logits = logits[:, : self._num_tokens]
        largest, ids = self._ops.greedy(logits)
        largest_values: list[float] = largest.tolist()
        greedy_ids: list[int] = ids.tolist()
        results = []
        for row, line, value, best in zip(rows, logits, largest_values, greedy_ids, strict=True):
            if not math.isfinite(value):
                results.append(RowResult((), f"the model gave no distribution: its largest logit is {value}"))
            else:
                results.append(self._sample_row(row, line, best))
        return results

    def _sample_row(self, row: Row, raw: Tensor, best: int) -> RowResult:
        params = row.sampling
        drawn: list[int] = []
        adjusted: dict[bool, Tensor] = {}
        for draw in row.draws:
            held = draw.index < params.min_tokens
            if not held and not _adjusts(params):
                drawn.append(best if params.is_greedy else self._draw(raw, params, draw))
                continue
            if held not in adjusted:
                adjusted[held] = self._adjust(row, raw, held)
            if not math.isfinite(float(adjusted[held].max())):
                return RowResult((), "no token is left to draw: every id is masked")
            drawn.append(self._draw(adjusted[held], params, draw))
        return RowResult(tuple(_with_logprobs(raw, params, drawn)))

    def _draw(self, logits: Tensor, params: SamplingParams, draw: Draw) -> int:
        if params.is_greedy:
            return int(logits.argmax())
        number = uniform(params.seed, draw.choice, draw.index)
        return self._ops.draw(logits, params.temperature, params.top_k, params.top_p, params.min_p, number)

    def _adjust(self, row: Row, raw: Tensor, held: bool) -> Tensor:
        """A copy of the row with bias, penalties and, if `held`, without every id that would end the output."""
        params, logits = row.sampling, raw.clone()
        if params.logit_bias:
            known = [(token, bias) for token, bias in params.logit_bias if token < len(logits)]
            ids = self._ids([token for token, _ in known])
            logits.index_add_(0, ids, torch.tensor([bias for _, bias in known], device=logits.device))
        self._penalise(logits, row)
        if held:
            stops = {*self._eos_token_ids, *params.stop_token_ids}
            logits[self._ids(sorted(stops))] = -math.inf
        return logits

    def _penalise(self, logits: Tensor, row: Row) -> None:
        params = row.sampling
        if params.repetition_penalty != 1.0:
            seen = self._ids(sorted(set(row.token_ids)))
            values = logits[seen]
            factor = params.repetition_penalty
            logits[seen] = torch.where(values > 0, values / factor, values * factor)
        if params.presence_penalty or params.frequency_penalty:
            ids, counts = torch.unique(self._ids(row.token_ids[row.num_prompt :]), return_counts=True)
            logits[ids] -= params.presence_penalty + params.frequency_penalty * counts.float()

    def _ids(self, token_ids: Sequence[int]) -> Tensor:
        return torch.tensor([token for token in token_ids if token < self._num_tokens], dtype=torch.int64)


def _adjusts(params: SamplingParams) -> bool:
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
    )


def _with_logprobs(raw: Tensor, params: SamplingParams, drawn: list[int]) -> list[Token]:
    if params.logprobs is None:
        return [Token(TokenId(token)) for token in drawn]
    logprobs = torch.log_softmax(raw, dim=-1)
    top: tuple[tuple[TokenId, float], ...] = ()
    if params.logprobs > 0:
        values, ids = torch.topk(logprobs, min(params.logprobs, len(raw)))
        top = tuple((TokenId(i), value) for i, value in zip(ids.tolist(), values.tolist(), strict=True))
    return [Token(TokenId(token), float(logprobs[token]), top) for token in drawn]
