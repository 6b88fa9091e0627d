"""When a lost choice is tried again: the one recovery path.

    decode lost · prefill lost · transfer broken · preempted · tokens that do not fit
        └▶ the same choice with a longer prompt, placed again, inside the deadline and `max_attempts`

Refusals are no losses: the request keeps its place in the queue and no attempt is counted. Nor is one for a choice
that was preempted: a full pool does that again and again to the newest stream, and each time it has come further. Nor
for one with which a worker that goes down had not begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvrelay.core.errors import Broken, DeadlineExceeded, Unavailable
from kvrelay.core.events import REPLAYABLE, Failed, FailReason
from kvrelay.core.ids import Choice, WorkerId
from kvrelay.router.output_stage import Answer


@dataclass(frozen=True, slots=True)
class Loss:
    """Why an attempt was lost, and which workers are better avoided by the next one."""

    reason: str
    """A label: "link", "engine", "transfer", "preempted", "draining", "protocol"."""
    message: str
    workers: tuple[WorkerId, ...]

    @property
    def is_nobodys_fault(self) -> bool:
        """It costs no attempt."""
        return self.reason in (FailReason.PREEMPTED.value, FailReason.DRAINING.value)


def loss_of(failed: Failed, *workers: WorkerId) -> Loss:
    """Raises the error that ends the request when trying again would not help."""
    if failed.reason is FailReason.NAN_LOGITS:
        raise Broken(f"the model gave no valid distribution for choice {failed.key.choice}: {failed.message}")
    if failed.reason is FailReason.DEADLINE:
        raise DeadlineExceeded(f"the deadline passed while a worker was busy with the request: {failed.message}")
    reason = failed.reason.value if failed.reason in REPLAYABLE else FailReason.ENGINE.value
    loss = Loss(reason, failed.message, workers)
    return replace(loss, workers=()) if loss.is_nobodys_fault else loss


def check_attempts(answers: Iterable[Answer], max_attempts: int, loss: Loss) -> None:
    """Raises Unavailable when a choice has had all its attempts."""
    for answer in answers:
        if answer.num_attempts >= max_attempts:
            raise Unavailable(
                f"choice {answer.choice} was lost in {answer.num_attempts} attempts, the last time by {loss.reason}: "
                f"{loss.message}"
            )


def start_groups(answers: Sequence[Answer]) -> list[tuple[Choice, ...]]:
    """Choices that have drawn nothing share one prompt and one Start; every other one has a prompt of its own."""
    untouched = tuple(answer.choice for answer in answers if answer.log.next_index == 0)
    groups: list[tuple[Choice, ...]] = [(answer.choice,) for answer in answers if answer.log.next_index > 0]
    return [untouched, *groups] if untouched else groups


