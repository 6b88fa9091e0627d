"""What comes out of `generate` and `chat`, in this order:

    Started ─▶ Delta* with one Finished per choice ─▶ Summary
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.core.events import Token
from kvrelay.core.output import Timing


@dataclass(frozen=True, slots=True)
class Started:
    request_id: str
    seed: int
    """Give it again to get the same answer again."""
    num_prompt_tokens: int
    model: str


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one choice. The texts of a choice joined are its answer."""

    text: str
    choice: int = 0
    first_index: int = 0
    """Output index of the first of `tokens`."""
    tokens: tuple[Token, ...] = ()
    """With log-probabilities if asked for. May be empty, as `text` may be."""


@dataclass(frozen=True, slots=True)
class Finished:
    finish_reason: str
    """"stop" or "length"."""
    choice: int = 0
    stop: str | int | None = None
    """The stop string or token id that ended it."""


@dataclass(frozen=True, slots=True)
class Summary:
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    timing: Timing = field(default_factory=Timing)
    """Milliseconds on the server."""
    mode: str = ""
    """"relay" or "local"."""
    num_attempts: int = 1
    num_resumes: int = 0
    """How often this client went on at another server after its stream had broken."""


Event = Started | Delta | Finished | Summary


@dataclass(frozen=True, slots=True)
class ModelInfo:
    id: str
    max_context: int
    """Tokens of prompt and answer together."""
