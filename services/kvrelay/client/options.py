"""How to connect, how to retry, and the options of one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import grpc

DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Tls:
    """Defaults: the system's certificate authorities, no client certificate. All values are PEM."""

    root_certificates: bytes | None = None
    private_key: bytes | None = None
    certificate_chain: bytes | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.root_certificates, self.private_key, self.certificate_chain)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Pauses double from `first_pause_s` up, cut by up to half at random; a server's wish wins if it is longer."""

    max_attempts: int = 5
    """Calls per request in all: retries before the first token and resumes after it."""
    first_pause_s: float = 0.1
    max_pause_s: float = 5.0


class ChatMessage(TypedDict, total=False):
    role: str
    content: str
    name: str


Conversation = str | Sequence[ChatMessage | Mapping[str, str]]
"""Messages in order; a plain string is one message of the user's."""


class Options(TypedDict, total=False):
    """Keyword arguments of `generate` and `chat`. What is left out takes the defaults of the OpenAI API."""

    model: str
    max_tokens: int
    temperature: float
    """0 is greedy."""
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    logprobs: int
    """How many alternatives per token, besides the token's own log-probability; 0 to 20."""
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_tokens: int
    n: int
    priority: int
    session_id: str
    """Turns of one conversation meet their KV cache again."""
    request_id: str
    """Your own name for the request, for the server's log."""
    timeout_s: float
    """For everything, retries included."""
