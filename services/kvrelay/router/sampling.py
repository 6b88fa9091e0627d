"""Sampling wishes, checked once for every front door: what comes out of here is safe to hand to a worker."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence

from kvrelay.core.errors import BadRequest
from kvrelay.core.ids import TokenId
from kvrelay.core.request import MAX_LOGPROBS, MAX_SEED, MIN_SEED, SamplingParams

MAX_STOP_TOKEN_IDS = 64
MAX_BIAS = 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Logits are multiplied or divided by it: a wider range would overflow them."""


def build_sampling(
    *,
    max_tokens: int,
    vocab_size: int,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    logprobs: int | None = None,
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    min_tokens: int | None = None,
    logprobs_param: str = "logprobs",
) -> SamplingParams:
    """None takes the default of the OpenAI API; without a seed one is minted. Raises BadRequest naming the field.

    `max_tokens` is already resolved. 0 is allowed here, for checking a request that wants no token: such parameters
    never reach a worker. top_k 0, -1 and everything from the vocabulary size on switch top-k off.
    """
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_within("temperature", temperature, 0.0, 2.0, 1.0),
        top_p=_within("top_p", top_p, 0.0, 1.0, 1.0),
        top_k=_top_k(top_k, vocab_size),
        min_p=_within("min_p", min_p, 0.0, 1.0, 0.0),
        seed=_seed(seed),
        repetition_penalty=_within(
            "repetition_penalty", repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY, 1.0
        ),
        presence_penalty=_within("presence_penalty", presence_penalty, -2.0, 2.0, 0.0),
        frequency_penalty=_within("frequency_penalty", frequency_penalty, -2.0, 2.0, 0.0),
        logit_bias=_logit_bias(logit_bias or {}, vocab_size),
        logprobs=_logprobs(logprobs, logprobs_param),
        stop_token_ids=_stop_token_ids(stop_token_ids, vocab_size),
        ignore_eos=ignore_eos,
        min_tokens=_min_tokens(min_tokens, max_tokens),
    )


def _within(name: str, value: float | None, low: float, high: float, default: float) -> float:
    if value is None:
        return default
    if not (math.isfinite(value) and low <= value <= high):
        raise BadRequest(f"{name} must be from {low:g} to {high:g}, found {value:g}", param=name)
    return value + 0.0  # -0.0 becomes 0.0


def _top_k(value: int | None, vocab_size: int) -> int:
    if value is None:
        return 0
    if value < -1:
        raise BadRequest(f"top_k must be at least 1, or 0 or -1 to switch it off; found {value}", param="top_k")
    return 0 if value >= vocab_size else max(0, value)


def _seed(value: int | None) -> int:
    if value is None:
        return secrets.randbits(63)
    if not MIN_SEED <= value <= MAX_SEED:
        raise BadRequest(f"seed must fit into 64 bits, from {MIN_SEED} to {MAX_SEED}", param="seed")
    return value


def _logit_bias(bias: Mapping[int, float], vocab_size: int) -> tuple[tuple[TokenId, float], ...]:
    for token_id, value in bias.items():
        if not 0 <= token_id < vocab_size:
            raise BadRequest(
                f"logit_bias: {token_id} is not a token id of this model; valid are 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        if not (math.isfinite(value) and abs(value) <= MAX_BIAS):
            raise BadRequest(f"logit_bias[{token_id}] must be from -100 to 100, found {value:g}", param="logit_bias")
    return tuple((TokenId(token_id), float(value)) for token_id, value in bias.items())


def _logprobs(value: int | None, param: str) -> int | None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise BadRequest(f"{param} must be from 0 to {MAX_LOGPROBS}, found {value}", param=param)
    return value


def _stop_token_ids(ids: Sequence[int], vocab_size: int) -> tuple[TokenId, ...]:
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise BadRequest(f"stop_token_ids: at most {MAX_STOP_TOKEN_IDS}, found {len(ids)}", param="stop_token_ids")
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise BadRequest(f"stop_token_ids: {token_id} is not a token id of this model", param="stop_token_ids")
    return tuple(TokenId(token_id) for token_id in ids)


def _min_tokens(value: int | None, max_tokens: int) -> int:
    if value is None:
        return 0
    if not 0 <= value <= max_tokens:
        raise BadRequest(f"min_tokens must be from 0 to max_tokens ({max_tokens}), found {value}", param="min_tokens")
    return value
