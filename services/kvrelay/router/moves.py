"""The choices of one request that their workers want to be rid of, and how far each has come.

    want ─▶ a place elsewhere? ─no─▶ again after a beat          the choice's end, loss or stop: drop
              └yes─▶ MoveAttempt ─▶ moved                                 │
                        └─▶ not moved: again after a beat, elsewhere ◀────┘ (only while the choice runs on)

A choice that finds no place runs on where it is; if that worker goes before its end, the choice is replayed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.core.config import LinkSettings
from kvrelay.core.ids import Choice, TransferId, WorkerId
from kvrelay.core.placement import WorkerRecord
from kvrelay.router.attempt import Source
from kvrelay.router.move import MoveAttempt
from kvrelay.router.replay import Loss

MAX_TRIES = 5
"""Targets asked for one choice. Looking in vain for one that could be asked does not count."""

Begin = Callable[[Choice, Source, frozenset[WorkerId]], MoveAttempt | None]
"""Place it elsewhere, but not on these. None: nowhere to go now."""


@dataclass(frozen=True, slots=True)
class MoveTimer:
    """A moment to look at a choice's move again. Comes through the mailbox, like everything else."""

    choice: Choice
    move: MoveAttempt | None
    """The move that broke and of which nothing more has been heard; None: it is time to look for a place again."""


@dataclass(eq=False, slots=True)
class _Wish:
    source: Source
    move: MoveAttempt | None = None
    timer: asyncio.TimerHandle | None = None
    num_tries: int = 0
    avoid: set[WorkerId] = field(default_factory=set)


class Moves:
    """Part of a coordinator."""

    def __init__(
        self, begin: Begin, on_moved: Callable[[WorkerRecord], None], post: Callable[[MoveTimer], None],
        settings: LinkSettings,
    ) -> None:
        self._begin = begin
        self._on_moved = on_moved
        self._post = post
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._wishes: dict[Choice, _Wish] = {}

    def want(self, choice: Choice, source: Source) -> None:
        self.drop(choice)
        self._wishes[choice] = _Wish(source)
        self._try(choice)

    def on_timer(self, timer: MoveTimer) -> None:
        wish = self._wishes.get(timer.choice)
        if wish is None or wish.move is not timer.move:
            return
        if timer.move is None:
            self._try(timer.choice)
        else:
            del self._wishes[timer.choice]
            timer.move.give_up(Loss("transfer", "nothing was heard of a move that broke", timer.move.workers))

    def moved(self, move: MoveAttempt) -> None:
        self._forget(move.choice)
        self._on_moved(move.record)

    def not_moved(self, move: MoveAttempt) -> None:
        wish = self._wishes.get(move.choice)
        if wish is None or wish.move is not move:
            return
        wish.move = None
        wish.avoid.update(move.workers)
        if wish.num_tries < MAX_TRIES:
            self._later(wish, self._settings.beat_s, MoveTimer(move.choice, None))

    def broken(self, move: MoveAttempt) -> None:
        wish = self._wishes.get(move.choice)
        if wish is not None and wish.move is move:
            self._later(wish, self._settings.silence_s, MoveTimer(move.choice, move))

    def stayed(self, choice: Choice, transfer_id: TransferId) -> None:
        """Late news of an earlier try is ignored."""
        wish = self._wishes.get(choice)
        if wish is not None and wish.move is not None and wish.move.transfer_id == transfer_id:
            wish.move.stayed()

    def handed_off(self, choice: Choice) -> bool:
        """False: nobody was to get it."""
        wish = self._wishes.get(choice)
        if wish is None or wish.move is None:
            return False
        wish.move.handed_off()
        return True

    def drop(self, choice: Choice) -> None:
        """The choice is over, or lost."""
        wish = self._forget(choice)
        if wish is not None and wish.move is not None:
            wish.move.cancel()

    def close(self) -> None:
        for choice in list(self._wishes):
            self.drop(choice)

    def _try(self, choice: Choice) -> None:
        wish = self._wishes[choice]
        wish.move = self._begin(choice, wish.source, frozenset(wish.avoid))
        if wish.move is None:
            wish.avoid.clear()
            self._later(wish, self._settings.beat_s, MoveTimer(choice, None))
            return
        wish.num_tries += 1
        wish.move.begin()

    def _forget(self, choice: Choice) -> _Wish | None:
        wish = self._wishes.pop(choice, None)
        if wish is not None and wish.timer is not None:
            wish.timer.cancel()
        return wish

    def _later(self, wish: _Wish, seconds: float, timer: MoveTimer) -> None:
        wish.timer = self._loop.call_later(seconds, self._post, timer)
