"""What is asked of a worker: one `Start` per attempt, carrying everything a fresh worker needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvrelay.core.handoff import Handoff
from kvrelay.core.ids import Attempt, Choice, RequestId, SeqKey, TokenId, TransferId

MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
GREEDY_BELOW = 1e-5
"""A temperature at or below this is greedy: dividing float32 logits by less overflows (SMP-01)."""
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. The draw is `hash(seed, choice, index)`: no state, any worker can continue."""

    max_tokens: int
    """Total output tokens of the choice, counted over all attempts; at least 1."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 switches it off."""
    min_p: float = 0.0
    seed: int = 0
    """int64; the router mints one when the client gives none."""
    repetition_penalty: float = 1.0
    """Over prompt and output."""
    presence_penalty: float = 0.0
    """Over output only, like `frequency_penalty`."""
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[TokenId, float], ...] = ()
    logprobs: int | None = None
    """None: none. k: the chosen token's and the k most likely ones', from the raw distribution before penalties."""
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    """Ignores every EOS of the model, not `stop_token_ids`."""
    min_tokens: int = 0
    """No EOS or stop id may be drawn at an index below this."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature <= GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class Migrate:
    """A running choice is to go on elsewhere: push its KV there and hand it over. The answer to a `Leaving`."""

    key: SeqKey
    """What it is called here."""
    to_attempt: Attempt
    """The attempt as which it has been reserved for at the receiver."""
    num_tokens: int
    """Tokens of the sequence that the receiver has reserved for. Their KV travels; tokens drawn since then go into
    the commit, and the receiver computes theirs in one chunk."""
    handoff: Handoff


class Leg(Enum):
    """Which part of a request a worker is asked to do. Role-neutral: any worker can do any of them."""

    LOCAL = "local"
    """Compute the prompt here and go on to the end."""
    RECEIVE = "receive"
    """Reserve blocks; the KV arrives by Push; go on to the end."""
    SEND = "send"
    """Compute the prompt, draw one token per choice, push the KV to `handoff.receivers`, forget."""


@dataclass(frozen=True, slots=True)
class Start:
    """One attempt at one or more choices of a request on one worker.

    A fresh request starts all its choices together (one prompt, forked copy-on-write). A replay is one `Start`
    per unfinished choice, whose `token_ids` are the prompt and the tokens so far.
    """

    request_id: RequestId
    attempt: Attempt
    choices: tuple[Choice, ...]
    token_ids: Sequence[TokenId]
    """Prompt followed by the output so far. Never changed by the receiver of the Start."""
    num_prompt: int
    """`token_ids[num_prompt:]` is output of earlier attempts: it counts for penalties, limits and indices."""
    sampling: SamplingParams
    leg: Leg
    transfer_id: TransferId | None = None
    """Set for RECEIVE and SEND."""
    handoff: Handoff | None = None
    """Set for SEND: where to push and what the receiver has already."""
    cache_salt: bytes = b""
    """Separates the prefix cache of tenants (KVC-02)."""
    priority: int = 0
    replay: bool = False
    """A stream that had already been admitted: goes ahead of new work and is never refused for room."""
    timeout_ms: int = 600_000
    """What is left of the request's deadline when the Start is issued."""

    @property
    def next_index(self) -> int:
        """Output index of the first token this Start will draw."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def key(self, choice: Choice) -> SeqKey:
        return SeqKey(self.request_id, choice, self.attempt)
