"""One sequence of tokens on its way through the engine.

    WAITING ──admitted──▶ RUNNING ──stop│length──▶ ENDED                         LOCAL
    WAITING ──admitted──▶ RUNNING ──prompt computed──▶ SENDING ──ended──▶ ENDED  SEND
    [WAITING] ──blocks──▶ RESERVED ──committed──▶ RUNNING ──stop│length──▶ ENDED RECEIVE (only replays wait)

    RUNNING ◀──stayed── SENDING ──ended──▶ ENDED                                 migration, see `moving`

    from everywhere: cancel, deadline, failure ──▶ ENDED

`move` alone changes the state, along these arrows.

A fresh prompt with n choices is one sequence with n choices until their first tokens are drawn (or committed);
then it is forked into n sequences with one choice each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvrelay.core.errors import Broken
from kvrelay.core.events import Token
from kvrelay.core.ids import Choice, SeqKey, TokenId, TransferId
from kvrelay.core.request import Leg, Migrate, Start
from kvrelay.kvcache.cache import BlockTable


class SeqState(Enum):
    WAITING = "waiting"
    RESERVED = "reserved"
    RUNNING = "running"
    SENDING = "sending"
    ENDED = "ended"


_MOVES = {
    SeqState.WAITING: {SeqState.RESERVED, SeqState.RUNNING, SeqState.ENDED},
    SeqState.RESERVED: {SeqState.RUNNING, SeqState.ENDED},
    SeqState.RUNNING: {SeqState.SENDING, SeqState.ENDED},
    SeqState.SENDING: {SeqState.RUNNING, SeqState.ENDED},
    SeqState.ENDED: set[SeqState](),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """Written by the engine thread only. `num_computed` chases `len(tokens)`: that is all a step has to know."""

    start: Start
    leg: Leg
    """Of the start, except that a SEND with one token left to draw has nothing to send and is LOCAL."""
    choices: list[Choice]
    """Those that have not ended yet."""
    tokens: list[TokenId]
    table: BlockTable
    stops: frozenset[int]
    """Token ids that end a choice from index `min_tokens` on."""
    arrived_at: float
    deadline: float
    """Both in seconds of the engine's clock."""
    state: SeqState = SeqState.WAITING
    num_computed: int = 0
    num_cached: int = 0
    """Tokens whose KV was found in the prefix cache at admission."""
    scheduled_at: float | None = None
    """When the first chunk was scheduled."""
    leaves_since: float | None = None
    """When the first KV of a SEND was ready to leave."""
    has_spoken: bool = False
    """Its first token of this attempt has been told: the next ones are plain `Tokens`."""
    keys: dict[Choice, SeqKey] = field(default_factory=dict)
    outgoing_id: TransferId | None = None
    """Of the Push that carries it away, from its opening until it has ended."""
    migrate: Migrate | None = None
    """Where it is to go on; None while nobody has said so."""
    kept: list[Token] | None = None
    """The tokens drawn since it has said `Leaving`; None before."""

    def move(self, state: SeqState) -> None:
        if state not in _MOVES[self.state]:
            raise Broken(f"a sequence cannot go from {self.state.value} to {state.value}")
        self.state = state

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.tokens) - self.num_computed

    @property
    def num_prompt(self) -> int:
        return self.start.num_prompt

    @property
    def next_index(self) -> int:
        """Output index of the next token to be drawn."""
        return len(self.tokens) - self.start.num_prompt

    @property
    def transfer_id(self) -> TransferId:
        transfer_id = self.start.transfer_id
        assert transfer_id is not None, "a leg without a transfer has no transfer id"
        return transfer_id

    def key(self, choice: Choice) -> SeqKey:
        return self.keys[choice]
