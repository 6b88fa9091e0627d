"""The counter between the front doors (HTTP, gRPC) and the kitchen (coordinator): all that a front door may use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from kvrelay.core.config import RouterSettings
from kvrelay.core.output import GenerateRequest, Output
from kvrelay.router.bell import Bell
from kvrelay.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelCard:
    served_name: str
    max_context: int
    """Tokens of the longest sequence that the attached decode side accepts; 0 while nothing is attached."""
    created: int
    """Unix seconds, for `/v1/models`."""


@dataclass(frozen=True, slots=True)
class Readiness:
    ready: bool
    reason: str
    """Why not, for a person who has to do something about it; empty when ready."""


class OpenRequest(Protocol):
    """A request under way. Its one reader looks whenever the bell has rung."""

    def take(self) -> list[Output] | None:
        """What has come since the last call, which may be nothing; None at the end. Raises as `FrontDoor.generate`
        does, after what came before."""
        ...

    async def close(self) -> None:
        """Cancels it on every worker, unless it has ended. Nothing of it runs afterwards."""
        ...


class FrontDoor(Protocol):
    @property
    def settings(self) -> RouterSettings: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def model_card(self) -> ModelCard: ...

    def readiness(self) -> Readiness: ...

    async def until_known(self) -> None:
        """Until a worker has told its context, for at most `max_waiting_s`: one may be coming. Before anything that
        looks at `model_card().max_context`. Raises as `generate` does when there is no place to wait."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Output]:
        """Started, then Delta and ChoiceFinished per choice, then Summary.

        Raises KvrelayError: before the first output for everything that can be known then (never fits, no room),
        later only when deadline or attempts are spent. Closing the iterator (or cancelling its task) cancels the
        request on every worker.
        """
        ...

    def open(self, request: GenerateRequest, bell: Bell) -> OpenRequest:
        """The same, for a reader that wants all that is there at once, of several requests perhaps: each rings the one
        bell. Raises when there is no place."""
        ...
