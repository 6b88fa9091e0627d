"""One choice on its way to the client: tokens by index in, deltas and the finish out.

    worker tokens ─▶ token log (no gap, no repeat) ─▶ OutputText (characters, stop strings) ─▶ Delta
                                                          └ a stop string: ChoiceFinished, whatever the worker does
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvrelay.core.events import FinishReason, Token
from kvrelay.core.ids import Choice, TokenId
from kvrelay.core.output import ChoiceFinished, Delta, Output
from kvrelay.router.token_log import TokenLog
from kvrelay.text.output import OutputText, TextStep


class Text(Protocol):
    """What `kvrelay.text.output.OutputText` offers."""

    def push(self, token_ids: Sequence[int]) -> TextStep: ...

    def finish(self) -> TextStep: ...


class Answer:
    """Owned by the coordinator of its request."""

    def __init__(
        self, choice: Choice, text: OutputText | Text, resume: Sequence[TokenId] = (),
        stop_token_ids: Sequence[TokenId] = (), resume_chars: int | None = None,
    ) -> None:
        """A resuming caller has the tokens `resume` and the first `resume_chars` characters; None: all they give."""
        self.choice = choice
        self.log = TokenLog(resume)
        self.num_attempts = 0
        self.is_done = False
        self._text = text
        self._stop_token_ids = frozenset(stop_token_ids)
        self._num_resumed = len(resume)
        self._resume_chars = resume_chars
        self._num_known_chars = 0
        """So many of the characters to come the caller has already."""
        self._num_visible = 0
        self._hidden: deque[Token] = deque()
        """Tokens whose text may yet become part of a stop string, oldest first; their indices follow `_num_visible`."""

    def resume(self) -> list[Output]:
        """Pass the caller's own tokens through the text stage. What they already end comes out: a stop string."""
        text, stop = "", None
        for token_id in self.log.ids:
            self._hidden.append(Token(token_id))
            step = self._text.push((token_id,))
            self._reveal(step)
            text += step.text
            stop = step.stop
            if stop is not None:
                break
        self._num_known_chars = len(text) if self._resume_chars is None else self._resume_chars
        outputs = self._delta(self._first_shown(), text, [], ())
        return outputs if stop is None else [*outputs, self._stopped(stop)]

    def accept(self, first_index: int, tokens: Sequence[Token]) -> list[Output]:
        """Raises ProtocolError. When a stop string ends the choice, `is_done` is set and later tokens do not count."""
        first_shown = self._first_shown()
        text, shown, offsets, stop = "", list[Token](), list[int](), None
        for token in self.log.unseen(first_index, tokens):
            self.log.append(token)
            self._hidden.append(token)
            step = self._text.push((token.token_id,))
            text += step.text
            shown += self._reveal(step)
            offsets += step.offsets
            stop = step.stop
            if stop is not None:
                break
        outputs = self._delta(first_shown, text, shown, offsets)
        return outputs if stop is None else [*outputs, self._stopped(stop)]

    def finish(self, reason: FinishReason) -> list[Output]:
        """The worker's end of the choice: what was held back comes out, unless it turns out to be a stop string."""
        first_shown = self._first_shown()
        step = self._text.finish()
        outputs = self._delta(first_shown, step.text, self._reveal(step), step.offsets)
        if step.stop is not None:
            return [*outputs, self._stopped(step.stop)]
        self.is_done = True
        token_id = self.log.last if reason is FinishReason.STOP and self.log.last in self._stop_token_ids else None
        return [*outputs, ChoiceFinished(self.choice, reason.value, token_id)]

    def _first_shown(self) -> int:
        return max(self._num_visible, self._num_resumed)

    def _reveal(self, step: TextStep) -> list[Token]:
        """Newly visible tokens that the caller does not have."""
        tokens: list[Token] = []
        while self._num_visible < step.num_visible_tokens:
            token = self._hidden.popleft()
            if self._num_visible >= self._num_resumed:
                tokens.append(token)
            self._num_visible += 1
        return tokens

    def _delta(self, first_index: int, text: str, tokens: list[Token], offsets: Sequence[int]) -> list[Output]:
        num_known = min(self._num_known_chars, len(text))
        self._num_known_chars -= num_known
        text = text[num_known:]
        if not text and not tokens:
            return []
        mine = tuple(offsets[len(offsets) - len(tokens) :])
        return [Delta(self.choice, first_index, text, tuple(tokens), mine)]

    def _stopped(self, stop: str) -> ChoiceFinished:
        self.is_done = True
        return ChoiceFinished(self.choice, FinishReason.STOP.value, stop)
