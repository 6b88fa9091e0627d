"""Who may come in, and who may try for a place next.

    Admission      counts the requests of this router: over the bound, or while draining, nobody enters
    WaitingRoom    orders those who want a worker: replays first, then by arrival

    ticket ─enter─▶ queue ─head: your turn─▶ the coordinator calls place() ─▶ placed: leave, next one's turn
                      ▲                                                  └▶ not_now: waits for `changed`

One ticket at a time has the turn. A head that cannot be placed keeps the others back: letting smaller requests pass
would starve the large one for ever. It cannot block them for ever either: new work waits for a bounded time, and what
can never fit is refused before it gets here.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from kvrelay.core.errors import NoRoom, Unavailable


class Admission:
    def __init__(self, max_inflight: int) -> None:
        self._max_inflight = max_inflight
        self._draining = False
        self.num_inflight = 0

    def enter(self) -> None:
        """Raises Overloaded over the bound, Unavailable while draining. Paired with `leave`."""
        if self._draining:
            raise Unavailable("this router is shutting down; try another one", retry_after_s=1.0)
        if self.num_inflight >= self._max_inflight:
            raise NoRoom(f"{self.num_inflight} requests are under way here already", retry_after_s=1.0)
        self.num_inflight += 1

    def leave(self) -> None:
        self.num_inflight -= 1

    @property
    def is_draining(self) -> bool:
        return self._draining

    def drain(self) -> None:
        self._draining = True


_numbers = count()


@dataclass(order=True, slots=True)
class Ticket:
    """A place in the queue. Keeps its rank when a refused request has to ask again."""

    rank: tuple[int, int, int]
    your_turn: Callable[[], None] = field(compare=False)

    @staticmethod
    def new(*, replay: bool, priority: int, your_turn: Callable[[], None]) -> Ticket:
        return Ticket((0 if replay else 1, -priority, next(_numbers)), your_turn)


class WaitingRoom:
    def __init__(self) -> None:
        self._queue: list[Ticket] = []
        self._turn: Ticket | None = None
        self._stalled = False
        """The head has tried in vain, and nothing has changed since."""

    def __len__(self) -> int:
        return len(self._queue)

    def enter(self, ticket: Ticket) -> None:
        insort(self._queue, ticket)
        if self._queue[0] is ticket:
            self._stalled = False
        self._pass_on()

    def leave(self, ticket: Ticket) -> None:
        """Placed, or given up. Unknown tickets are fine: a request that ends leaves with all it may have."""
        if ticket not in self._queue:
            return
        self._stalled = self._stalled and self._queue[0] is not ticket
        self._queue.remove(ticket)
        if self._turn is ticket:
            self._turn = None
        self._pass_on()

    def not_now(self, ticket: Ticket) -> None:
        if self._turn is ticket:
            self._turn = None
            self._stalled = self._queue[0] is ticket
            self._pass_on()

    def changed(self) -> None:
        """A worker came, or reported its load: the head may try again."""
        self._stalled = False
        self._pass_on()

    def _pass_on(self) -> None:
        if self._turn is None and not self._stalled and self._queue:
            self._turn = self._queue[0]
            self._turn.your_turn()
