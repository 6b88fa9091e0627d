"""A running sequence that goes on elsewhere. The source's half of a migration.

    RUNNING ──Leaving──▶ runs on, tokens kept ──Migrate──▶ Push open, runs on ──level──▶ SENDING ──committed──▶ ENDED
                              ▲                                │                            │        (handed off)
                              └───────────── Stayed ◀──────────┴──── the Push broke ◀───────┘

Its full blocks leave while it still draws tokens. It stops between two steps, once they are on their way; what is
left to send then is the partial last block of what the receiver has reserved for, and the tokens drawn since. The
receiver computes those in one chunk. Whatever goes wrong, the sequence is still here and runs on.
"""

from __future__ import annotations

from kvrelay.core.events import Leaving, Stayed
from kvrelay.core.handoff import ChoiceTokens
from kvrelay.core.ids import TransferId
from kvrelay.core.request import Leg, Migrate
from kvrelay.engine.sequence import SeqState, Sequence
from kvrelay.engine.work import Work


class Moving:
    """Engine thread only; called between two steps."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._accepted: list[Sequence] = []
        """Told where to go; their Push opens when the KV that it needs is computed."""

    def advance(self, *, everybody: bool) -> None:
        """Open what can be opened. `everybody`: ask for a place elsewhere for each sequence that runs here."""
        if everybody:
            for seq in self._work.running:
                self._ask_to_leave(seq)
        for seq in tuple(self._accepted):
            if seq.state is not SeqState.RUNNING or seq.migrate is None:
                self._accepted.remove(seq)
            elif seq.num_computed >= seq.migrate.num_tokens:
                self._accepted.remove(seq)
                self._work.sendings.migrate(seq, seq.migrate)

    def accept(self, migrate: Migrate) -> None:
        seq = self._work.by_key.get(migrate.key)
        if seq is None:
            return
        fault = self._fault(seq, migrate)
        if fault:
            self._work.tell(Stayed(migrate.key, migrate.handoff.transfer_id, fault))
            return
        seq.migrate = migrate
        self._accepted.append(seq)

    def level(self, transfer_id: TransferId) -> None:
        """All full blocks are on their way: stop here, send the rest and commit."""
        seq = self._work.sendings.find_streaming(transfer_id)
        if seq is None or seq.migrate is None or seq.kept is None:
            return
        self._work.running.remove(seq)
        num_since = len(seq.tokens) - seq.migrate.num_tokens
        tokens = tuple(seq.kept[len(seq.kept) - num_since :])
        self._work.sendings.commit(seq, seq.migrate.num_tokens, (ChoiceTokens(seq.migrate.key.choice, tokens),))

    def stay(self, seq: Sequence, why: str) -> None:
        """The Push is over without a commit. Nothing to say if the sequence has ended meanwhile."""
        migrate, seq.migrate = seq.migrate, None
        if migrate is None or seq.state is SeqState.ENDED:
            return
        if seq.state is SeqState.SENDING:
            self._work.run(seq)
        self._work.tell(Stayed(migrate.key, migrate.handoff.transfer_id, why))

    def _ask_to_leave(self, seq: Sequence) -> None:
        """A prompt is finished first: its KV is what travels. A sender leaves by itself."""
        if seq.kept is None and seq.has_spoken and seq.leg is not Leg.SEND and len(seq.choices) == 1:
            seq.kept = []
            self._work.tell(Leaving(seq.key(seq.choices[0])))

    def _fault(self, seq: Sequence, migrate: Migrate) -> str:
        handoff, num_tokens = migrate.handoff, migrate.num_tokens
        if seq.kept is None or seq.state is not SeqState.RUNNING:
            return "this choice has not asked to leave"
        if seq.migrate is not None:
            return f"it is on its way with transfer {seq.migrate.handoff.transfer_id}"
        if not len(seq.tokens) - len(seq.kept) <= num_tokens <= len(seq.tokens):
            return f"cannot hand over {num_tokens} of {len(seq.tokens)} tokens, the last {len(seq.kept)} of them kept"
        if not 0 <= handoff.num_cached_tokens < num_tokens or handoff.num_cached_tokens % self._work.cache.block_size:
            return f"the receiver cannot have {handoff.num_cached_tokens} of {num_tokens} tokens cached"
        if handoff.transfer_id in self._work.sendings:
            return f"transfer {handoff.transfer_id} exists already"
        return ""
