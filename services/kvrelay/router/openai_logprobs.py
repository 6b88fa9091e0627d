"""Logprobs in the two forms of the OpenAI API.

JSON has no infinity: a token that cannot be drawn has -9999.0. Bytes are the token's own, whether or not they are
UTF-8 alone; the completions form, which has no bytes, writes such a token as `bytes:\\xe2\\x82`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.core.events import Token
from kvrelay.core.output import Delta
from kvrelay.router.openai_call import Json
from kvrelay.text.tokenizer import Tokenizer

LOWEST = -9999.0


def chat_logprobs(tokenizer: Tokenizer, delta: Delta, num_top: int) -> Json:
    return {"content": [_chat_entry(tokenizer, token, num_top) for token in delta.tokens], "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, delta: Delta, num_top: int) -> Json:
    return {
        "tokens": [_name(tokenizer.token_bytes(token.token_id)) for token in delta.tokens],
        "token_logprobs": [_finite(token.logprob) for token in delta.tokens],
        "top_logprobs": [_top(tokenizer, token, num_top) for token in delta.tokens],
        "text_offset": list(delta.text_offsets),
    }


def join_logprobs(parts: Sequence[Json]) -> Json:
    """Lists are joined, the rest is as in the first part."""
    joined: Json = {key: list(value) if isinstance(value, list) else value for key, value in parts[0].items()}
    for part in parts[1:]:
        for key, value in part.items():
            if isinstance(value, list):
                joined[key] += value
    return joined


def _chat_entry(tokenizer: Tokenizer, token: Token, num_top: int) -> Json:
    top = [_chat_token(tokenizer.token_bytes(token_id), logprob) for token_id, logprob in token.top[:num_top]]
    return {**_chat_token(tokenizer.token_bytes(token.token_id), token.logprob), "top_logprobs": top}


def _chat_token(data: bytes, logprob: float | None) -> Json:
    return {"token": data.decode("utf-8", errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _top(tokenizer: Tokenizer, token: Token, num_top: int) -> dict[str, float]:
    """The likeliest and, where any are asked for, the chosen one. Of two with one name the likelier stays."""
    if num_top == 0:
        return {}
    top: dict[str, float] = {}
    for token_id, logprob in (*token.top[:num_top], (token.token_id, token.logprob)):
        top.setdefault(_name(tokenizer.token_bytes(token_id)), _finite(logprob))
    return top


def _name(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float | None) -> float:
    return LOWEST if logprob is None or not logprob >= LOWEST else logprob
