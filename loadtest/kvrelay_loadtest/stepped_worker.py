"""A worker without a model that talks as a real one does: one message per step, for all its sequences together.

    python -m kvrelay_loadtest.stepped_worker STEP_S READY_FILE

Runs until it is told to stop. First tokens come at once: what a client waits for them is the way there and back.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

from kvrelay.core.placement import Role
from kvrelay.worker.fakes import FakeWorker

NUM_BLOCKS = 1 << 18
MAX_CONTEXT = 1 << 16


def cycling_letters(history: Sequence[int], index: int, draw: int) -> int:
    """Costs nothing, unlike a token that depends on the whole history."""
    return 97 + index % 26


class SteppedWorker(FakeWorker):
    """All sequences move on the same tick."""

    def __init__(self, step_s: float) -> None:
        super().__init__(
            Role.MIXED, num_blocks=NUM_BLOCKS, max_context=MAX_CONTEXT, next_token=cycling_letters, step_s=step_s
        )
        self._tick = asyncio.Event()
        self._begun: weakref.WeakSet[asyncio.Task[object]] = weakref.WeakSet()

    async def step(self) -> None:
        task = asyncio.current_task()
        if task is not None and task not in self._begun:
            self._begun.add(task)
            return
        await self._tick.wait()

    async def run(self) -> None:
        """Ticks for ever, at absolute times: a late tick does not delay the next."""
        loop = asyncio.get_running_loop()
        at = loop.time()
        while True:
            at = max(at + self.step_s, loop.time())
            await asyncio.sleep(at - loop.time())
            tick, self._tick = self._tick, asyncio.Event()
            tick.set()


async def main(step_s: float, ready: Path) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    worker = SteppedWorker(step_s)
    record = await worker.start()
    ticking = asyncio.create_task(worker.run())
    fresh = ready.with_name(f"{ready.name}.new")
    fresh.write_text(json.dumps({"address": record.address}))
    fresh.replace(ready)
    await stopped.wait()
    ticking.cancel()
    await worker.stop()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), Path(sys.argv[2])))
