"""How long a request may be: one rule, used by every front door (API-04)."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.core.errors import BadRequest, Unavailable
from kvrelay.core.ids import TokenId
from kvrelay.text.tokenizer import Tokenizer


def resolve_max_tokens(num_prompt: int, requested: int | None, max_context: int, *, param: str = "max_tokens") -> int:
    """Output tokens the request gets: what it asked for, or else all that the context leaves.

    `max_context` counts prompt and output together. Zero tokens are a valid wish. Raises BadRequest with all three
    numbers if they do not fit, Unavailable while no worker has told its context.
    """
    if max_context <= 0:
        raise Unavailable("no worker that can decode is attached yet")
    if requested is not None and requested < 0:
        raise BadRequest(f"{param} must be at least 0, found {requested}", param=param)
    wanted = max(1, max_context - num_prompt) if requested is None else requested
    if num_prompt + wanted > max_context:
        asked = "at least 1" if requested is None else str(requested)
        raise BadRequest(
            f"this model's context is {max_context} tokens, but the prompt has {num_prompt} tokens "
            f"and {asked} more were requested",
            param=param if requested else None,
            code="context_length_exceeded",
        )
    return wanted


def encode_prompt(tokenizer: Tokenizer, text: str, max_context: int, *, param: str) -> tuple[TokenId, ...]:
    """A raw prompt as ids. Literals of control tokens in it are ordinary text.

    The empty prompt is BOS alone, and refused where the tokenizer has no BOS.
    """
    check_length(tokenizer, text, max_context, param=param)
    try:
        ids = tokenizer.encode(text)
    except BadRequest as error:
        raise BadRequest(f"{param}: {error.message}", param=param) from error
    if not ids and tokenizer.bos_id is None:
        raise BadRequest(f"{param} is empty, and this model has no BOS token to start from", param=param)
    return tuple(TokenId(token_id) for token_id in ids or [tokenizer.bos_id or 0])


def check_length(tokenizer: Tokenizer, text: str, max_context: int, *, param: str) -> None:
    """Refuses what is too long however it is cut into tokens, before the work of cutting it is done."""
    longest = tokenizer.longest_token_bytes
    if max_context > 0 and len(text) > max_context * longest:
        raise BadRequest(
            f"this model's context is {max_context} tokens; {param} has {len(text)} characters, "
            f"which are at least {-(-len(text) // longest)} tokens",
            param=param,
            code="context_length_exceeded",
        )


def check_ids(ids: Sequence[int], vocab_size: int, *, param: str) -> tuple[TokenId, ...]:
    """A prompt given as ids: at least one, all of them the tokenizer's own."""
    if not ids:
        raise BadRequest(f"{param} holds no token", param=param)
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise BadRequest(
            f"{param}: {low if low < 0 else high} is not a token id of this model; valid are 0 to {vocab_size - 1}",
            param=param,
        )
    return tuple(TokenId(token_id) for token_id in ids)
