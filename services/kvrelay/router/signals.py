"""What a coordinator task is woken for."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.router.asking import Ask
from kvrelay.router.link_port import LegSignal
from kvrelay.router.moves import MoveTimer


@dataclass(frozen=True, slots=True)
class YourTurn:
    ask: Ask


@dataclass(frozen=True, slots=True)
class WaitOver:
    ask: Ask


@dataclass(frozen=True, slots=True)
class StopMet:
    """A choice has ended by its text: time to look whether any is left."""


Signal = LegSignal | YourTurn | WaitOver | MoveTimer | StopMet
