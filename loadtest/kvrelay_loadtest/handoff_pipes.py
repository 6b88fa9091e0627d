"""Bandwidth of a pipe: the KV of one sequence after the other, pool to pool, verified; nothing computes.

    grpc      this process pushes ─▶ a child process with a transfer hub of its own, over loopback TCP
    loopback  both ends on one event loop of this process

Both use the real halves of `kvrelay.transfer` and the demo model's KV layout; only the engines are stand-ins.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvrelay.core.config import TransferSettings
from kvrelay.core.events import Token
from kvrelay.core.handoff import ChoiceTokens, Commit, Handoff, KvIdentity, KvShard, Receiver
from kvrelay.core.ids import Attempt, BlockId, Choice, Incarnation, RequestId, TokenId, TransferId, WorkerId
from kvrelay.core.kv import KvLayout
from kvrelay.core.ports import Expected, Outgoing
from kvrelay.model.storage import KvStorage
from kvrelay.transfer.desk import TransferDesk
from kvrelay.transfer.fakes import FakeInbox
from kvrelay.transfer.hub import TransferHub
from kvrelay.transfer.pipes import LoopbackPipe
from kvrelay.transfer.words import Home
from kvrelay_kernels.dispatch import ops_for
from kvrelay_loadtest.children import Child, ChildFailed, cpu_s

LAYOUT = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
IDENTITY = KvIdentity("bench", "bench", "bench", LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.head_dim, 16)
NUM_BLOCKS = 64
"""Per sequence: 1,024 tokens, 23.6 MB."""
WAIT_S = 60.0
COMMIT = Commit(NUM_BLOCKS * LAYOUT.block_size, 0, (ChoiceTokens(Choice(0), (Token(TokenId(1)),)),))
NAME, INCARNATION = WorkerId("receiver"), Incarnation("bench")


@dataclass(frozen=True, slots=True)
class Bandwidth:
    mb_s: float
    cpu_s_per_gb: float
    """Of both ends, all threads."""

    def as_dict(self) -> dict[str, float]:
        return {"mb_s": self.mb_s, "cpu_s_per_gb": self.cpu_s_per_gb}


def over_grpc(sequences: int) -> Bandwidth:
    """Raises ChildFailed."""
    with tempfile.TemporaryDirectory() as scratch:
        ready = Path(scratch) / "ready"
        command = [sys.executable, "-m", "kvrelay_loadtest.handoff_pipes", str(ready), str(sequences + 1)]
        with Child("receiver", command) as child:
            address = str(child.wait_for_file(ready, WAIT_S)["address"])
            inbox = FakeInbox()
            hub = TransferHub(TransferSettings(), IDENTITY, _pool(), WorkerId("sender"), Incarnation("sender"))
            hub.bind(inbox)
            hub.start("127.0.0.1", 0)
            try:
                return _timed(lambda number: _send(hub, inbox, address, number), sequences, child.pid)
            finally:
                hub.stop(WAIT_S)


def over_loopback(sequences: int) -> Bandwidth:
    return asyncio.run(_over_loopback(sequences))


async def _over_loopback(sequences: int) -> Bandwidth:
    pipe, settings = LoopbackPipe(), TransferSettings()
    sends, pushes = FakeInbox(), FakeInbox()
    sender = TransferDesk(settings, Home(WorkerId("sender"), Incarnation("s"), IDENTITY, _pool()), sends, pipe)
    receiver = TransferDesk(settings, Home(NAME, INCARNATION, IDENTITY, _pool()), pushes, LoopbackPipe())
    pipe.listen("loopback", receiver.receive)
    before, begin = 0.0, 0.0
    for number in range(sequences + 1):
        if number == 1:  # the first one warms up
            before, begin = cpu_s(os.getpid()), time.perf_counter()
        receiver.expect(_expected(number))
        sender.send(_outgoing(number, "loopback"))
        sender.finish(_transfer_id(number), COMMIT)
        async with asyncio.timeout(WAIT_S):
            while not sender.is_empty:  # noqa: ASYNC110  (the stand-in has no loop to wake)
                await asyncio.sleep(0)
        _check(sends, number)
    seconds, used = time.perf_counter() - begin, cpu_s(os.getpid()) - before
    await sender.stop()
    await receiver.stop()
    return _bandwidth(sequences, seconds, used)


def _timed(push: Callable[[int], None], sequences: int, other_pid: int) -> Bandwidth:
    push(0)
    pids = (os.getpid(), other_pid)
    before, begin = sum(map(cpu_s, pids)), time.perf_counter()
    for number in range(1, sequences + 1):
        push(number)
    seconds = time.perf_counter() - begin
    return _bandwidth(sequences, seconds, sum(map(cpu_s, pids)) - before)


def _bandwidth(sequences: int, seconds: float, used_s: float) -> Bandwidth:
    num_bytes = sequences * NUM_BLOCKS * LAYOUT.block_bytes
    return Bandwidth(num_bytes / 1e6 / seconds, used_s / (num_bytes / 1e9))


def _send(hub: TransferHub, inbox: FakeInbox, address: str, number: int) -> None:
    transfer_id = _transfer_id(number)
    hub.send(_outgoing(number, address))
    hub.finish(transfer_id, COMMIT)
    if not inbox.wait_until(lambda: transfer_id in inbox.send_errors):
        raise ChildFailed(f"a push did not end within {WAIT_S:g} s")
    _check(inbox, number)


def _check(inbox: FakeInbox, number: int) -> None:
    errors = inbox.send_errors[_transfer_id(number)]
    if errors != [""]:
        raise ChildFailed(f"a push failed: {errors}")


def _pool() -> KvStorage:
    cpu = torch.device("cpu")
    storage = KvStorage(LAYOUT, NUM_BLOCKS, cpu, ops_for(cpu, torch.bfloat16, LAYOUT.head_dim))
    storage.pool.random_(0, 255)
    return storage


def _transfer_id(number: int) -> TransferId:
    return TransferId(f"bench-{number}")


def _blocks() -> tuple[BlockId, ...]:
    return tuple(map(BlockId, range(NUM_BLOCKS)))


def _expected(number: int) -> Expected:
    return Expected(_transfer_id(number), RequestId("bench"), Attempt(0), 0, _blocks())


def _outgoing(number: int, address: str) -> Outgoing:
    shard = KvShard(0, LAYOUT.num_layers, 0, LAYOUT.num_kv_heads, LAYOUT.dtype)
    handoff = Handoff(_transfer_id(number), (Receiver(NAME, INCARNATION, address, shard),), 0)
    return Outgoing(RequestId("bench"), Attempt(0), handoff, _blocks(), 0, LAYOUT.block_size)


def receive(arguments: Sequence[str]) -> None:
    """The child: expects every sequence at once (into the same blocks: they come one by one), until it is ended."""
    ready, count = Path(arguments[0]), int(arguments[1])
    torch.set_num_threads(1)
    hub = TransferHub(TransferSettings(max_open=count), IDENTITY, _pool(), NAME, INCARNATION)
    hub.bind(FakeInbox())
    address = hub.start("127.0.0.1", 0)
    for number in range(count):
        hub.expect(_expected(number))
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    fresh = ready.with_name("fresh")
    document: dict[str, Any] = {"address": address}
    fresh.write_text(json.dumps(document))
    fresh.replace(ready)
    over.wait()
    hub.stop(WAIT_S)


if __name__ == "__main__":
    receive(sys.argv[1:])
