"""Both halves of a process on one event loop: `TransferPort` for callers who are on that loop already."""

from __future__ import annotations

from kvrelay.core.config import TransferSettings
from kvrelay.core.handoff import Commit
from kvrelay.core.ids import TransferId
from kvrelay.core.ports import EngineInbox, Expected, Outgoing
from kvrelay.transfer.pipes import FrameStream, Pipe
from kvrelay.transfer.receiving import Receiving
from kvrelay.transfer.sending import Sending
from kvrelay.transfer.words import Home, PushAnswer

STOPPING = "the transfer side is stopping"


class TransferDesk:
    """Belongs to the loop it is made on; owns the pipe."""

    def __init__(self, settings: TransferSettings, home: Home, inbox: EngineInbox, pipe: Pipe) -> None:
        self._inbox = inbox
        self._pipe = pipe
        self._stopped = False
        self._receiving = Receiving(settings, home, inbox)
        self._sending = Sending(settings, home, inbox, pipe)

    @property
    def is_empty(self) -> bool:
        return self._receiving.is_empty and self._sending.is_empty

    def expect(self, expected: Expected) -> None:
        if self._stopped:
            self._inbox.push_ended(expected.transfer_id, STOPPING)
        else:
            self._receiving.expect(expected)

    def close(self, transfer_id: TransferId) -> None:
        self._receiving.close(transfer_id)

    def send(self, outgoing: Outgoing) -> None:
        if self._stopped:
            self._inbox.send_ended(outgoing.handoff.transfer_id, STOPPING)
        else:
            self._sending.send(outgoing)

    def progress(self, transfer_id: TransferId, num_computed: int) -> None:
        self._sending.progress(transfer_id, num_computed)

    def finish(self, transfer_id: TransferId, commit: Commit) -> None:
        self._sending.finish(transfer_id, commit)

    def abort_send(self, transfer_id: TransferId) -> None:
        self._sending.abort(transfer_id)

    async def receive(self, stream: FrameStream) -> PushAnswer:
        """Serve one Push call."""
        return await self._receiving.receive(stream)

    async def stop(self) -> None:
        """End everything; what is open, or comes later, gets its `push_ended` or `send_ended`."""
        self._stopped = True
        self._receiving.close_all(STOPPING)
        await self._sending.abort_all(STOPPING)
        await self._pipe.close()
