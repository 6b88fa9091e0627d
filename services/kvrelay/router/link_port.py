"""The seam between a request's coordinator and the Attach streams: what a link can be asked, and what comes back.

A *leg* is one `Start` on one worker. Everything that happens to it reaches the coordinator's mailbox as a signal:

    link.start(start, mailbox) ─▶ Arrival*  (the worker's events, in order)
                               └▶ Lost      (the stream ended, or was down already: nothing more will come)

`links.WorkerLink` is the real thing; `scripted.ScriptedWorker` is the one for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvrelay.core.events import Event
from kvrelay.core.handoff import Receiver
from kvrelay.core.ids import Attempt, Choice, RequestId, WorkerId
from kvrelay.core.placement import Snapshot, WorkerRecord
from kvrelay.core.request import Migrate, Start


@dataclass(frozen=True, slots=True)
class Arrival:
    worker_id: WorkerId
    event: Event
    receivers: tuple[Receiver, ...] = ()
    """Only beside a `Reserved`: where its shards can be pushed."""

    @property
    def attempt(self) -> Attempt:
        return self.event.key.attempt


@dataclass(frozen=True, slots=True)
class Lost:
    """The stream that carried this leg is gone, and with it all the work behind it."""

    worker_id: WorkerId
    attempt: Attempt
    why: str


LegSignal = Arrival | Lost
Deliver = Callable[[LegSignal], None]
"""Takes a signal into the mailbox of the request. Never blocks, never raises."""


class LinkPort(Protocol):
    @property
    def record(self) -> WorkerRecord: ...

    def start(self, start: Start, deliver: Deliver, num_blocks: int) -> None:
        """Send it. If the stream is down, `Lost` is delivered at once.

        `num_blocks` is what the leg is expected to take, for the snapshot until the worker reports it itself.
        """
        ...

    def cancel(self, request_id: RequestId, attempt: Attempt, choices: tuple[Choice, ...] = ()) -> None:
        """Tell the worker. Without choices the whole leg goes, and nothing more of it is delivered."""
        ...

    def migrate(self, migrate: Migrate) -> None:
        """Tell the worker where to push a choice that it wants to be rid of."""
        ...

    def forget(self, request_id: RequestId, attempt: Attempt) -> None:
        """The leg is over by its own events: deliver nothing more of it."""
        ...


class FleetPort(Protocol):
    def snapshot(self) -> Snapshot: ...

    def link(self, worker_id: WorkerId) -> LinkPort | None:
        """None when it has just left."""
        ...
