"""Two workers, P and D, joined by a pipe: the real halves over fake pools and fake engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvrelay.core.config import TransferSettings
from kvrelay.core.events import Token
from kvrelay.core.handoff import ChoiceTokens, Commit, Handoff, KvIdentity, KvShard, PushOpen, Receiver, Slab
from kvrelay.core.ids import Attempt, BlockId, Choice, Incarnation, RequestId, TokenId, TransferId, WorkerId
from kvrelay.core.kv import blocks_for
from kvrelay.core.ports import Expected, Outgoing
from kvrelay.rpc.frames import Frame
from kvrelay.transfer.desk import TransferDesk
from kvrelay.transfer.fakes import FakeInbox, FakeKv
from kvrelay.transfer.pipes import FrameStream, LoopbackPipe, Pipe
from kvrelay.transfer.words import Home, PipeBroken, PushAnswer
from tests.support.virtual_time import run_virtual

IDENTITY = KvIdentity(
    model="weights", rope="rope", tokenizer="bytes", num_layers=3, num_kv_heads=2, head_dim=4, block_size=4
)
SHARD = KvShard(layer_begin=0, layer_end=3, head_begin=0, head_end=2, dtype="float32")
SETTINGS = TransferSettings()
NUM_BLOCKS = 32
T1 = TransferId("t1")
TOKENS = (ChoiceTokens(Choice(0), (Token(TokenId(7), -0.5),)),)
MakePipe = Callable[[Pipe], Pipe]


@dataclass
class Worker:
    name: WorkerId
    kv: FakeKv
    inbox: FakeInbox
    home: Home


def worker(name: str, identity: KvIdentity = IDENTITY, shard: KvShard = SHARD) -> Worker:
    kv = FakeKv(identity, shard, NUM_BLOCKS)
    home = Home(WorkerId(name), Incarnation(f"{name}-1"), identity, kv)
    return Worker(WorkerId(name), kv, FakeInbox(), home)


def block_ids(ids: Sequence[int]) -> tuple[BlockId, ...]:
    return tuple(BlockId(block) for block in ids)


def expected(blocks: Sequence[int], *, first_block: int = 0, transfer_id: TransferId = T1) -> Expected:
    return Expected(transfer_id, RequestId("r"), Attempt(0), first_block, block_ids(blocks))


def receiver_of(home: Home, address: str) -> Receiver:
    return Receiver(home.worker_id, home.incarnation, address, home.kv.shard)


def outgoing(
    blocks: Sequence[int], receivers: Sequence[Receiver], *, first_block: int = 0, transfer_id: TransferId = T1
) -> Outgoing:
    handoff = Handoff(transfer_id, tuple(receivers), first_block * IDENTITY.block_size)
    return Outgoing(RequestId("r"), Attempt(0), handoff, block_ids(blocks), first_block, IDENTITY.block_size)


def commit(num_tokens: int) -> Commit:
    """As the engine hands it over: it cannot know the number of slabs."""
    return Commit(num_tokens, 0, TOKENS)


def content(block: int) -> bytes:
    """Different for every block, and a pattern that no tile boundary repeats."""
    return bytes((block * 7 + i) % 251 for i in range(97))


class World:
    """P sends to D in one event loop. What is lent is locked in the pool once the loan is over."""

    def __init__(
        self, *, p: Worker | None = None, d: Worker | None = None, wrap: MakePipe = lambda pipe: pipe
    ) -> None:
        self.p, self.d = p or worker("p"), d or worker("d")
        self.pipe = LoopbackPipe()
        self.p_desk = TransferDesk(SETTINGS, self.p.home, self.p.inbox, wrap(self.pipe))
        self.d_desk = TransferDesk(SETTINGS, self.d.home, self.d.inbox, LoopbackPipe())
        self.pipe.listen("d", self.d_desk.receive)
        self.lent: dict[TransferId, tuple[BlockId, ...]] = {}
        self.read: dict[TransferId, tuple[BlockId, ...]] = {}
        self.d.inbox.on_push_ended = lambda transfer_id: self.d.kv.lock(self.lent[transfer_id])
        self.p.inbox.on_send_ended = lambda transfer_id: self.p.kv.lock(self.read[transfer_id])

    @property
    def receiver(self) -> Receiver:
        return receiver_of(self.d.home, "d")

    def reserve(self, blocks: Sequence[int], *, first_block: int = 0, transfer_id: TransferId = T1) -> None:
        reservation = expected(blocks, first_block=first_block, transfer_id=transfer_id)
        self.lent[transfer_id] = reservation.blocks
        self.d_desk.expect(reservation)

    def send(
        self,
        blocks: Sequence[int],
        *,
        first_block: int = 0,
        transfer_id: TransferId = T1,
        receiver: Receiver | None = None,
    ) -> None:
        for block in blocks:
            self.p.kv.fill(BlockId(block), content(block))
        push = outgoing(blocks, [receiver or self.receiver], first_block=first_block, transfer_id=transfer_id)
        self.read[transfer_id] = push.blocks
        self.p_desk.send(push)

    def assert_empty(self) -> None:
        """Nothing open, everything ended once, nobody touched what was not lent."""
        assert self.p_desk.is_empty
        assert self.d_desk.is_empty
        assert all(len(errors) == 1 for errors in self.d.inbox.push_errors.values())
        assert all(len(errors) == 1 for errors in self.p.inbox.send_errors.values())
        assert set(self.d.inbox.push_errors) == set(self.lent)
        assert set(self.p.inbox.send_errors) == set(self.read)
        assert self.p.kv.violations == []
        assert self.d.kv.violations == []

    def assert_copied(self, sent: Sequence[int], received: Sequence[int]) -> None:
        for ours, theirs in zip(received, sent, strict=True):
            assert self.d.kv.block(BlockId(ours)) == self.p.kv.block(BlockId(theirs))


class Script:
    """A `FrameStream` that says what it was told, then ends, or says nothing more."""

    def __init__(self, frames: Sequence[Frame], *, then_silence: bool = False) -> None:
        self._frames = list(frames)
        self._silent = then_silence

    async def read(self) -> Frame | None:
        if self._frames:
            return self._frames.pop(0)
        if self._silent:
            await asyncio.get_running_loop().create_future()
        return None


class Recorder:
    """A pipe to nowhere that keeps the frames and answers like a receiver that is content."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    async def accept(self, stream: FrameStream) -> PushAnswer:
        while (frame := await stream.read()) is not None:
            self.frames.append(frame)
            if isinstance(frame, Commit):
                return PushAnswer(True)
        raise PipeBroken("no commit")


Story = Callable[[], Coroutine[Any, Any, None]]


def story(tell: Story) -> Callable[[], None]:
    """A test in virtual time."""

    def test() -> None:
        run_virtual(tell())

    test.__name__, test.__doc__ = tell.__name__, tell.__doc__
    return test


async def soon() -> None:
    await asyncio.sleep(0.1)


async def recorded_push(blocks: Sequence[int], *, first_block: int = 0, num_tokens: int = 0) -> list[Frame]:
    """The frames of a true push, one slab per block, addressed to D: material for receivers' stories."""
    world, recorder = World(), Recorder()
    world.pipe.listen("d", recorder.accept)
    world.send(blocks, first_block=first_block)
    for done in range(first_block + 1, len(blocks)):
        world.p_desk.progress(T1, done * IDENTITY.block_size)
        await asyncio.sleep(0.01)
    tokens = num_tokens or len(blocks) * IDENTITY.block_size
    assert blocks_for(tokens, IDENTITY.block_size) == len(blocks)
    world.p_desk.finish(T1, commit(tokens))
    await asyncio.sleep(0.01)
    assert world.p.inbox.send_errors == {T1: [""]}
    return recorder.frames


def slabs_of(frames: Sequence[Frame]) -> list[Slab]:
    return [frame for frame in frames if isinstance(frame, Slab)]


def opening_of(frames: Sequence[Frame]) -> PushOpen:
    assert isinstance(frames[0], PushOpen)
    return frames[0]


def with_opening(frames: Sequence[Frame], **changes: object) -> list[Frame]:
    return [replace(opening_of(frames), **changes), *frames[1:]]  # type: ignore[arg-type]
