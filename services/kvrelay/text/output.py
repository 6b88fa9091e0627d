"""One choice's output as text: ids in, text that is safe to show out, with what is needed to place logprobs.

    ids ─▶ bytes ─▶ characters ─▶ stop matcher ─▶ text
             └ control tokens      └ holds what may become a stop string
               have none             (not before `min_tokens`)

A token is visible once its text is known to start before any stop match; only visible tokens may be shown with
their logprobs. Without stop strings every token is visible at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.text.detokenizer import Detokenizer
from kvrelay.text.stops import StopMatcher


class TokenBytes(Protocol):
    def token_bytes(self, token_id: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class TextStep:
    text: str
    """Safe to emit now. Never part of a stop string, never half a character."""
    offsets: tuple[int, ...]
    """Per newly visible token, where its text starts in the choice's output, in characters."""
    num_visible_tokens: int
    """From the start of the choice."""
    stop: str | None = None
    """The stop string that ended the choice; nothing comes after it."""


class OutputText:
    """`push` ids as they come, `finish` once at the end. The joined texts do not depend on how the ids were cut."""

    def __init__(self, tokenizer: TokenBytes, stops: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._detokenizer = Detokenizer()
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_visible = 0
        self._num_emitted = 0
        self._waiting: list[int] = []
        """Offsets of the tokens that are not visible yet."""
        self._skip_char = False
        """The next character began before `min_tokens`: it takes no part in a match."""

    def push(self, token_ids: Sequence[int]) -> TextStep:
        if self._matcher is None:
            return self._push_freely(token_ids)
        texts = []
        for token_id in token_ids:
            if self._is_over:
                break
            texts.append(self._push_one(token_id))
        return self._step("".join(texts), all_visible=False)

    def _push_freely(self, token_ids: Sequence[int]) -> TextStep:
        """Nothing is held back but half a character."""
        pieces = [self._detokenizer.push(self._token_bytes(token_id)) for token_id in token_ids]
        self._num_visible += len(pieces)
        return TextStep("".join([text for text, _ in pieces]), tuple([at for _, at in pieces]), self._num_visible)

    def finish(self) -> TextStep:
        """Gives out what was held. A stop match that was waiting for an earlier one is decided here."""
        if self._is_over or self._matcher is None:
            return self._step(self._detokenizer.finish(), all_visible=self._matcher is None)
        text = self._matching(self._detokenizer.finish())
        text += self._matcher.finish()
        return self._step(text, all_visible=self._matcher.matched is None)

    @property
    def _is_over(self) -> bool:
        return self._matcher is not None and self._matcher.matched is not None

    def _push_one(self, token_id: int) -> str:
        """Text that this token makes safe to emit, with stop strings."""
        was_partial = self._detokenizer.has_partial
        text, offset = self._detokenizer.push(self._token_bytes(token_id))
        self._waiting.append(offset)
        self._num_tokens += 1
        if self._num_tokens <= self._min_tokens:
            return text
        if self._num_tokens == self._min_tokens + 1:
            self._skip_char = was_partial
        return self._matching(text)

    def _matching(self, text: str) -> str:
        assert self._matcher is not None
        if self._skip_char and text:
            self._skip_char = False
            return text[0] + self._matcher.push(text[1:])
        return self._matcher.push(text)

    def _step(self, text: str, *, all_visible: bool) -> TextStep:
        self._num_emitted += len(text)
        num_new = len(self._waiting) if all_visible else self._count_visible()
        offsets = tuple(self._waiting[:num_new])
        del self._waiting[:num_new]
        self._num_visible += num_new
        return TextStep(text, offsets, self._num_visible, self._matcher.matched if self._matcher else None)

    def _count_visible(self) -> int:
        """Waiting tokens that start before everything undecided. Offsets never fall, so the first later one ends it."""
        count = 0
        for offset in self._waiting:
            if offset >= self._num_emitted and self._num_visible + count >= self._min_tokens:
                break
            count += 1
        return count
