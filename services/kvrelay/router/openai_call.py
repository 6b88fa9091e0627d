"""One HTTP call, validated: its prompts, and the shape in which the answer is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvrelay.core.ids import Choice
from kvrelay.core.output import ChoiceFinished, Delta, GenerateRequest, Output, Started, Summary
from kvrelay.router.bell import Bell
from kvrelay.router.front import FrontDoor, OpenRequest

Json = dict[str, Any]


class Shape(Protocol):
    """How one endpoint writes choices. `index` counts over all prompts of the call: prompt · n + choice."""

    def logprobs(self, delta: Delta) -> Json | None:
        """None unless the call asked for them."""
        ...

    def piece(self, index: int, text: str, logprobs: Json | None, *, is_first: bool) -> Json:
        """A streamed part of a choice."""
        ...

    def last_piece(self, index: int, finished: ChoiceFinished, *, is_first: bool) -> Json:
        """The part that carries the finish reason."""
        ...

    def whole(self, index: int, text: str, logprobs: Json | None, finished: ChoiceFinished) -> Json: ...

    def chunk(self, choices: Sequence[Json]) -> Json:
        """The object around pieces."""
        ...

    def reply(self, choices: Sequence[Json]) -> Json:
        """The object around whole choices; usage is added by the caller."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    requests: tuple[GenerateRequest, ...]
    shape: Shape
    stream: bool
    include_usage: bool

    def index(self, prompt: int, choice: Choice) -> int:
        return prompt * self.requests[0].n + choice


def open_request(front: FrontDoor, request: GenerateRequest, bell: Bell) -> OpenRequest:
    """What the coordinator gives; a request for no tokens needs no worker."""
    return front.open(request, bell) if request.sampling.max_tokens > 0 else _NoTokens(request)


class _NoTokens:
    def __init__(self, request: GenerateRequest) -> None:
        started = Started(request.request_id, request.sampling.seed, len(request.prompt_ids))
        ends = [ChoiceFinished(Choice(choice), "length") for choice in range(request.n)]
        self._outputs: list[Output] | None = [started, *ends, Summary(len(request.prompt_ids), 0, 0, mode="none")]

    def take(self) -> list[Output] | None:
        taken, self._outputs = self._outputs, None
        return taken

    async def close(self) -> None:
        """Nothing runs."""


def usage(summaries: Sequence[Summary]) -> Json:
    """Over all prompts of the call; each prompt counts once, whatever its n. Timing is that of the slowest one."""
    num_prompt = sum(summary.num_prompt_tokens for summary in summaries)
    num_output = sum(summary.num_output_tokens for summary in summaries)
    timing = max((summary.timing for summary in summaries), key=lambda timing: timing.first_token)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(summary.num_cached_tokens for summary in summaries)},
        "timing_ms": {
            "queue": round(timing.queue, 3),
            "reserve": round(timing.reserve, 3),
            "prefill": round(timing.prefill, 3),
            "first_token": round(timing.first_token, 3),
            "transfer_hidden": round(timing.transfer_hidden, 3),
            "transfer_unhidden": round(timing.transfer_unhidden, 3),
        },
    }
