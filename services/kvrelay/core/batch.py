"""The contract between deciding (`engine`, integers) and computing (`model`, tensors): a plan in, samples out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.core.events import Token
from kvrelay.core.ids import BlockId, Choice, SeqKey, TokenId
from kvrelay.core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be drawn from a row's last logits. A prompt with n choices draws n times from one row."""

    choice: Choice
    index: int
    """Output index of the token: seeds the draw and decides `min_tokens`."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step: compute KV for tokens [num_computed, num_computed + num_scheduled).

    `token_ids` and `block_table` are the scheduler's own lists, lent for the duration of the step: read only.
    """

    key: SeqKey
    token_ids: Sequence[TokenId]
    num_prompt: int
    num_computed: int
    num_scheduled: int
    block_table: Sequence[BlockId]
    """Covers at least `num_computed + num_scheduled` tokens; entries past that may be unset."""
    sampling: SamplingParams
    draws: tuple[Draw, ...]
    """Empty for a chunk that does not reach the last token."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy-on-write fork: done before any row of the step is computed."""

    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    rows: tuple[Row, ...]
    copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_scheduled for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowResult:
    tokens: tuple[Token, ...]
    """One per draw, in order."""
    error: str | None = None
    """Set when this row has no valid distribution (NaN logits): the request fails, the batch goes on."""


@dataclass(frozen=True, slots=True)
class StepResult:
    rows: tuple[RowResult, ...]
    """In the order of the plan's rows."""


class Runner(Protocol):
    """Computes a step. Called from the engine thread only; returns when KV and samples of the step are complete."""

    def run(self, plan: StepPlan) -> StepResult: ...
