"""The sender's half: every sequence whose KV is leaving this process, by transfer id.

What happens to one of them is in `departure.py`; `send_ended` is posted here, once, when it has ended.
"""

from __future__ import annotations

import asyncio
import logging

from kvrelay.core.config import TransferSettings
from kvrelay.core.handoff import Commit
from kvrelay.core.ids import TransferId
from kvrelay.core.ports import EngineInbox, Outgoing
from kvrelay.transfer.departure import Departure
from kvrelay.transfer.pipes import Pipe
from kvrelay.transfer.words import Home, outcome_of

log = logging.getLogger(__name__)


class Sending:
    """Belongs to the transfer loop. Unknown transfer ids are ignored: their `send_ended` is on its way."""

    def __init__(self, settings: TransferSettings, home: Home, inbox: EngineInbox, pipe: Pipe) -> None:
        self._settings = settings
        self._home = home
        self._inbox = inbox
        self._pipe = pipe
        self._live: dict[TransferId, Departure] = {}

    @property
    def is_empty(self) -> bool:
        return not self._live

    def send(self, outgoing: Outgoing) -> None:
        transfer_id = outgoing.handoff.transfer_id
        if transfer_id in self._live:
            log.error("transfer %s is being sent already; the second send is ignored", transfer_id)
            return
        self._live[transfer_id] = Departure(
            outgoing, self._settings, self._home, self._pipe, self._forget, self._inbox.send_level
        )

    def progress(self, transfer_id: TransferId, num_computed: int) -> None:
        if transfer_id in self._live:
            self._live[transfer_id].progress(num_computed)

    def finish(self, transfer_id: TransferId, commit: Commit) -> None:
        if transfer_id in self._live:
            self._live[transfer_id].finish(commit)

    def abort(self, transfer_id: TransferId, reason: str = "aborted by the sending engine") -> None:
        if transfer_id in self._live:
            self._live[transfer_id].abort(reason)

    async def abort_all(self, reason: str) -> None:
        """Returns when every send has ended."""
        departures = list(self._live.values())
        for departure in departures:
            departure.abort(reason)
        await asyncio.gather(*(departure.wait() for departure in departures))

    def _forget(self, departure: Departure, error: str) -> None:
        transfer_id = departure.outgoing.handoff.transfer_id
        del self._live[transfer_id]
        seconds = asyncio.get_running_loop().time() - departure.opened_at
        self._home.watch.transfer_ended("out", outcome_of(error), departure.num_bytes, seconds)
        self._inbox.send_ended(transfer_id, error)
