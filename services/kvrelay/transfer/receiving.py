"""The receiver's half: every reservation that waits for KV, and the Push calls that bring it.

A transfer id accepts one Push, ever. A Push with a stale key (unknown id, other incarnation, request or attempt) is
refused and leaves the reservation alone: it was not meant for it. Anything else that goes wrong in a Push closes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

from kvrelay.core.config import TransferSettings
from kvrelay.core.handoff import PushOpen
from kvrelay.core.ids import TransferId
from kvrelay.core.ports import EngineInbox, Expected
from kvrelay.rpc.frames import Frame
from kvrelay.transfer.pipes import FrameStream
from kvrelay.transfer.reception import Reception, State
from kvrelay.transfer.words import Home, PushAnswer, PushFailed, outcome_of

log = logging.getLogger(__name__)

MAX_REMEMBERED = 4096
"""Ended transfer ids that are still told from unknown ones. Forgetting one is harmless: unknown ids are refused too."""


class Receiving:
    """Belongs to the transfer loop."""

    def __init__(self, settings: TransferSettings, home: Home, inbox: EngineInbox) -> None:
        self._settings = settings
        self._home = home
        self._inbox = inbox
        self._live: dict[TransferId, Reception] = {}
        self._ended: OrderedDict[TransferId, None] = OrderedDict()

    @property
    def is_empty(self) -> bool:
        return not self._live

    def expect(self, expected: Expected) -> None:
        transfer_id = expected.transfer_id
        if transfer_id in self._live:
            log.error("transfer %s is expected already; the second reservation is ignored", transfer_id)
        elif transfer_id in self._ended:
            self._inbox.push_ended(transfer_id, "this transfer id was used before")
        elif len(self._live) >= self._settings.max_open:
            self._inbox.push_ended(transfer_id, f"{self._settings.max_open} transfers are open already")
        else:
            self._live[transfer_id] = Reception(expected, self._home, self._inbox, self._forget)

    def close(self, transfer_id: TransferId, error: str = "closed by the receiving engine") -> None:
        """Unknown ids are ignored: their `push_ended` is on its way or was delivered."""
        reception = self._live.get(transfer_id)
        if reception is not None:
            reception.close(error)

    def close_all(self, error: str) -> None:
        for reception in list(self._live.values()):
            reception.close(error)

    async def receive(self, stream: FrameStream) -> PushAnswer:
        """One Push call, from its first frame to the answer. Cancelling it is the sender going away."""
        reception: Reception | None = None
        try:
            opening = await self._read(stream)
            if not isinstance(opening, PushOpen):
                raise PushFailed(f"a Push begins with Open, not with {type(opening).__name__}", retryable=False)
            reception = self._find(opening)
            reception.open(opening)
            while reception.state is State.OPEN:
                reception.accept(await self._read(stream, reception))
                await asyncio.sleep(0)  # let running streams and the engine's calls in between two slabs
            if reception.state is State.CLOSED:
                raise PushFailed(reception.error)
            return await reception.answer()
        except PushFailed as failure:
            if reception is not None:
                reception.close_if_open(str(failure))
            log.warning("refused a Push: %s", failure)
            return PushAnswer(False, str(failure), failure.retryable)
        finally:
            if reception is not None:
                reception.push_returned()

    async def _read(self, stream: FrameStream, reception: Reception | None = None) -> Frame:
        stall_s = self._settings.stall_s
        try:
            async with asyncio.timeout(stall_s) as scope:
                if reception is not None:
                    reception.reading = scope
                frame = await stream.read()
        except TimeoutError:
            closed = reception is not None and reception.state is not State.OPEN
            why = reception.error if reception is not None and closed else f"stalled: no frame for {stall_s:g} s"
            raise PushFailed(why) from None
        finally:
            if reception is not None:
                reception.reading = None
        if frame is None:
            raise PushFailed("the Push ended without a commit")
        return frame

    def _find(self, opening: PushOpen) -> Reception:
        """The reservation this Push is for. Raises PushFailed, which touches none, for a stale key."""
        transfer_id = opening.transfer_id
        if opening.receiver_incarnation != self._home.incarnation:
            theirs = opening.receiver_incarnation
            raise PushFailed(f"incarnation: this is {self._home.incarnation} != pushed to {theirs}", retryable=False)
        seal = self._home.seal
        if seal is not None and (fault := seal.fault(opening.handle, transfer_id, opening.tenant)):
            raise PushFailed(f"transfer {transfer_id} is refused: {fault}", retryable=False)
        reception = self._live.get(transfer_id)
        if reception is None:
            known = "has ended already" if transfer_id in self._ended else "is unknown here"
            raise PushFailed(f"transfer {transfer_id} {known}", retryable=False)
        expected = reception.expected
        ours, theirs_key = (expected.request_id, expected.attempt), (opening.request_id, opening.attempt)
        if ours != theirs_key:
            raise PushFailed(
                f"stale key: transfer {transfer_id} is for {ours[0]}@{ours[1]} != {theirs_key[0]}@{theirs_key[1]}",
                retryable=False,
            )
        if reception.state is not State.EXPECTED:
            raise PushFailed(f"transfer {transfer_id} accepts one Push, and has had it", retryable=False)
        return reception

    def _forget(self, reception: Reception) -> None:
        transfer_id = reception.expected.transfer_id
        del self._live[transfer_id]
        if reception.opened_at is not None:
            seconds = asyncio.get_running_loop().time() - reception.opened_at
            self._home.watch.transfer_ended("in", outcome_of(reception.error), reception.num_bytes, seconds)
        self._ended[transfer_id] = None
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
