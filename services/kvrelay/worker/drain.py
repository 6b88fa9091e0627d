"""Going down without anybody noticing.

    engine.drain ─▶ load says `draining` (routers place nothing here) ─▶ running sequences move away, or end ─▶ stop
                                                                          └─ grace is over: stop anyway, routers replay
"""

from __future__ import annotations

import asyncio
import logging

from kvrelay.core.ports import EngineInbox
from kvrelay.worker.attach import AttachService
from kvrelay.worker.presence import Presence

log = logging.getLogger(__name__)


async def drain(engine: EngineInbox, attach: AttachService, presence: Presence, grace_s: float) -> bool:
    """Take no new work and wait until the last router has its last event. False: some were left after `grace_s`."""
    engine.drain()
    attach.announce_draining()
    presence.announce()
    try:
        async with asyncio.timeout(grace_s):
            await attach.wait_empty()
    except TimeoutError:
        log.warning("%d sequences are left after draining for %g s", attach.num_open, grace_s)
        return False
    return True
