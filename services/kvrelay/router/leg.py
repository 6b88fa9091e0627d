"""One `Start` on one worker, from its sending until nothing of it is left there.

    begin ─▶ open choices ─terminal events─▶ over
                 └─cancel─▶ over (told the worker exactly once)
"""

from __future__ import annotations

from kvrelay.core.handoff import Handoff
from kvrelay.core.ids import Attempt, Choice, WorkerId
from kvrelay.core.placement import WorkerRecord
from kvrelay.core.request import Migrate, Start
from kvrelay.router.link_port import Deliver, LinkPort


class WorkerLeg:
    """Knows which choices the worker still works on: a Cancel is sent only where there is something to cancel."""

    def __init__(self, link: LinkPort, start: Start) -> None:
        self.start = start
        self.open: set[Choice] = set()
        self._link = link

    @property
    def record(self) -> WorkerRecord:
        return self._link.record

    @property
    def worker_id(self) -> WorkerId:
        return self._link.record.worker_id

    def begin(self, deliver: Deliver, num_blocks: int) -> None:
        self.open = set(self.start.choices)
        self._link.start(self.start, deliver, num_blocks)

    def migrate(self, choice: Choice, to_attempt: Attempt, num_tokens: int, handoff: Handoff) -> None:
        if choice in self.open:
            self._link.migrate(Migrate(self.start.key(choice), to_attempt, num_tokens, handoff))

    def ended(self, choice: Choice) -> None:
        """The worker has said its last word about this choice."""
        if choice in self.open:
            self.open.discard(choice)
            if not self.open:
                self.gone()

    def gone(self) -> None:
        """Refused, or lost with its stream: there is nobody to tell."""
        self.open.clear()
        self._link.forget(self.start.request_id, self.start.attempt)

    def cancel(self) -> None:
        if self.open:
            self.open.clear()
            self._link.cancel(self.start.request_id, self.start.attempt)

    def cancel_choice(self, choice: Choice) -> None:
        if self.open == {choice}:
            self.cancel()
        elif choice in self.open:
            self.open.discard(choice)
            self._link.cancel(self.start.request_id, self.start.attempt, (choice,))
