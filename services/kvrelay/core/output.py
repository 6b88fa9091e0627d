"""What the front doors (HTTP, gRPC) ask of the coordinator, and what it gives them back."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.core.events import Token
from kvrelay.core.ids import Choice, RequestId, SessionId, TenantId, TokenId
from kvrelay.core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One validated prompt with its n choices. Text is tokenised exactly once, before this exists."""

    request_id: RequestId
    prompt_ids: tuple[TokenId, ...]
    sampling: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    tenant: TenantId = TenantId("default")
    session: SessionId | None = None
    priority: int = 0
    timeout_s: float = 600.0
    resume: tuple[TokenId, ...] = ()
    """Output tokens a caller already has (the SDK after a router's death); n = 1 only. Output starts after them."""
    resume_chars: int | None = None
    """Characters of text this caller already has: with stop strings that is not a matter of whole tokens. None: all
    that `resume` gives."""
    open_ended: bool = False
    """The client gave no `max_tokens`: what it gets is whatever fits where it runs."""
    endpoint: str = "other"
    """Which door it came through: a metric's label ("chat", "completions", "grpc_generate", "grpc_chat")."""


@dataclass(frozen=True, slots=True)
class Started:
    """First thing out of every request: the caller can resume with this seed."""

    request_id: RequestId
    seed: int
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one choice. `text` may be empty while a stop string or half a character is held back."""

    choice: Choice
    first_index: int
    text: str
    tokens: tuple[Token, ...]
    text_offsets: tuple[int, ...] = ()
    """Per token, where its text starts in the choice's output, in characters."""


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    choice: Choice
    finish_reason: str
    """"stop" or "length"."""
    stop_reason: str | int | None = None
    """The stop string or token id that ended it."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The seven moments of a request as a breakdown of its time to first token, in milliseconds."""

    queue: float = 0.0
    reserve: float = 0.0
    prefill: float = 0.0
    first_token: float = 0.0
    """Request accepted → first token at the router."""
    transfer_hidden: float = 0.0
    """KV was already leaving while prefill still computed: this much of the transfer costs nobody anything."""
    transfer_unhidden: float = 0.0
    """`Committed` − `FirstToken`: the part of the transfer that the client can feel."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Last thing out of every request that ended well. Counted from the token log, so replays change nothing."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    timing: Timing = field(default_factory=Timing)
    mode: str = "relay"
    prefill_worker: str = ""
    decode_worker: str = ""
    num_attempts: int = 1


Output = Started | Delta | ChoiceFinished | Summary
