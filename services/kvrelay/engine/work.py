"""Everything the engine has accepted and not ended, and the one way in which a choice ends.

A choice ends by exactly one terminal event (`finish`, `fail`), or without any where somebody else has told its end
already (`forget`). With its last choice a sequence leaves: out of the queue or the batch, its transfer abandoned, its
blocks given back. What a transfer may still touch stays pinned until that transfer has ended.
"""

from __future__ import annotations

from kvrelay.core.clock import Clock
from kvrelay.core.events import Event, Failed, FailReason, Finished, FinishReason
from kvrelay.core.ids import Choice, SeqKey
from kvrelay.core.ports import TransferPort
from kvrelay.engine.queue import WaitingQueue
from kvrelay.engine.reservations import Reservations
from kvrelay.engine.sending import Sendings
from kvrelay.engine.sequence import SeqState, Sequence
from kvrelay.kvcache.cache import KvCache


class Work:
    """Owned by the engine thread. `running` is in order of admission: the last one is the newest."""

    def __init__(self, cache: KvCache, transfer: TransferPort, clock: Clock, max_reservations: int) -> None:
        self.cache = cache
        self.clock = clock
        self.by_key: dict[SeqKey, Sequence] = {}
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.reservations = Reservations(cache, transfer, max_reservations)
        self.sendings = Sendings(cache, transfer)
        self.is_short_of_room = False
        """The first in the queue found no blocks when last asked: nobody may overtake it."""
        self._events: list[Event] = []

    def tell(self, event: Event) -> None:
        self._events.append(event)

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> tuple[Event, ...]:
        events, self._events = tuple(self._events), []
        return events

    def add(self, seq: Sequence) -> None:
        for choice in seq.choices:
            self.by_key[seq.key(choice)] = seq

    def run(self, seq: Sequence) -> None:
        seq.move(SeqState.RUNNING)
        self.running.append(seq)

    @property
    def num_rows(self) -> int:
        """Rows that everything admitted needs or will need in one step."""
        num_running = sum(len(seq.choices) for seq in self.running)
        return num_running + self.reservations.num_reserved_choices + self.sendings.num_frozen

    def fork(self, seq: Sequence, choices: list[Choice]) -> list[Sequence]:
        """One running sequence for each of `choices`, which share `seq`'s blocks; `seq` itself becomes the last.

        The last one is also the last to write into the shared partial block, and so the one that keeps it.
        """
        spare_each = -(-len(seq.table.spare) // len(choices))
        children = []
        for choice in choices[:-1]:
            child = self._child(seq, choice, spare_each)
            self.by_key[seq.key(choice)] = child
            children.append(child)
        seq.choices = [choices[-1]]
        place = self.running.index(seq)
        self.running[place:place] = children
        return [*children, seq]

    def finish(self, seq: Sequence, choice: Choice, reason: FinishReason) -> None:
        self.tell(Finished(seq.key(choice), reason))
        self.forget(seq, choice)

    def fail(self, seq: Sequence, choice: Choice, reason: FailReason, message: str) -> None:
        self.tell(Failed(seq.key(choice), reason, message))
        self.forget(seq, choice)

    def fail_all(self, seq: Sequence, reason: FailReason, message: str) -> None:
        for choice in tuple(seq.choices):
            self.fail(seq, choice, reason, message)

    def forget(self, seq: Sequence, choice: Choice) -> None:
        """The choice is over here; what is to be said about it has been said."""
        del self.by_key[seq.key(choice)]
        seq.choices.remove(choice)
        if not seq.choices:
            self._retire(seq)

    def _retire(self, seq: Sequence) -> None:
        if seq.state is SeqState.WAITING:
            self.waiting.remove(seq)
        elif seq.state is SeqState.RUNNING:
            self.running.remove(seq)
        elif seq.state is SeqState.RESERVED:
            self.reservations.abandon(seq)
        self.sendings.abandon(seq)
        self.cache.release(seq.table)
        seq.move(SeqState.ENDED)

    def _child(self, seq: Sequence, choice: Choice, num_spare: int) -> Sequence:
        return Sequence(
            start=seq.start, leg=seq.leg, choices=[choice], tokens=list(seq.tokens),
            table=self.cache.fork(seq.table, num_spare), stops=seq.stops, arrived_at=seq.arrived_at,
            deadline=seq.deadline, state=SeqState.RUNNING, num_computed=seq.num_computed, num_cached=seq.num_cached,
            scheduled_at=seq.scheduled_at, has_spoken=seq.has_spoken, keys=seq.keys,
        )  # fmt: skip
