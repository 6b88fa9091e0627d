"""Tokens and sampling parameters: core <-> proto.

A `TokenColumn` is one step's tokens of one sequence as columns. Its logprobs are there for all tokens or for none,
and every token has the same number of top entries; probabilities travel as float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from kvrelay.core.errors import BadRequest
from kvrelay.core.events import Token
from kvrelay.core.ids import TokenId
from kvrelay.core.request import SamplingParams
from kvrelay.pb import common_pb2 as pb


@lru_cache(1 << 16)
def _plain_token(token_id: int) -> Token:
    """Without logprobs a token is its id, so one object serves all streams: making it would be most of decoding it."""
    return Token(TokenId(token_id))


def tokens_to_pb(tokens: Sequence[Token]) -> pb.TokenColumn:
    """Raises ValueError if some tokens have a logprob and some have not, or their tops differ in width."""
    column = pb.TokenColumn(ids=[token.token_id for token in tokens])
    logprobs = [token.logprob for token in tokens if token.logprob is not None]
    if logprobs and len(logprobs) != len(tokens):
        raise ValueError("a column of tokens has logprobs for all of them or for none")
    column.logprobs.extend(logprobs)
    widths = {len(token.top) for token in tokens}
    if len(widths) > 1:
        raise ValueError(f"a column of tokens has one width of top entries, found {sorted(widths)}")
    if any(widths):
        column.top_width = widths.pop()
        column.top_ids.extend(token_id for token in tokens for token_id, _ in token.top)
        column.top_logprobs.extend(logprob for token in tokens for _, logprob in token.top)
    return column


def tokens_from_pb(column: pb.TokenColumn) -> tuple[Token, ...]:
    """Raises BadRequest if the columns do not have the same length."""
    ids = column.ids
    if not (column.logprobs or column.top_width or column.top_ids or column.top_logprobs):
        return tuple([_plain_token(token_id) for token_id in ids])
    _check_columns(column)
    logprobs: Sequence[float | None] = column.logprobs or [None] * len(ids)
    width = column.top_width
    tops = [(TokenId(token_id), logprob) for token_id, logprob in zip(column.top_ids, column.top_logprobs, strict=True)]
    return tuple(
        Token(TokenId(token_id), logprob, tuple(tops[row * width : (row + 1) * width]))
        for row, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True))
    )


def _check_columns(column: pb.TokenColumn) -> None:
    count = len(column.ids)
    if len(column.logprobs) not in (0, count):
        raise BadRequest(f"a column of {count} tokens has {len(column.logprobs)} logprobs")
    for name, found in (("top_ids", len(column.top_ids)), ("top_logprobs", len(column.top_logprobs))):
        if found != count * column.top_width:
            raise BadRequest(f"a column of {count} tokens of top width {column.top_width} has {found} {name}")


def sampling_to_pb(params: SamplingParams) -> pb.Sampling:
    return pb.Sampling(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bias_ids=[token_id for token_id, _ in params.logit_bias],
        bias_values=[value for _, value in params.logit_bias],
        logprobs=params.logprobs,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
    )


def sampling_from_pb(message: pb.Sampling) -> SamplingParams:
    """Raises BadRequest if the bias columns differ in length."""
    if len(message.bias_ids) != len(message.bias_values):
        raise BadRequest(f"{len(message.bias_ids)} bias ids with {len(message.bias_values)} bias values")
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(
            (TokenId(token_id), value) for token_id, value in zip(message.bias_ids, message.bias_values, strict=True)
        ),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        stop_token_ids=tuple(TokenId(token_id) for token_id in message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        min_tokens=message.min_tokens,
    )
