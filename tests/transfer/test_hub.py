"""Hubs on their own threads, over real gRPC on loopback."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest

from kvrelay.core.clock import FakeClock
from kvrelay.core.config import TransferSettings
from kvrelay.core.handles import HandleSeal
from kvrelay.core.handoff import Receiver
from kvrelay.core.ids import BlockId, Incarnation, TransferId
from kvrelay.pb import transfer_pb2 as pb
from kvrelay.pb import transfer_pb2_grpc as pb_grpc
from kvrelay.pb import worker_pb2, worker_pb2_grpc
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.frames import frame_to_pb
from kvrelay.rpc.server import bind, new_server
from kvrelay.transfer.hub import TransferHub
from tests.support.virtual_time import run_virtual
from tests.transfer.world import (
    IDENTITY,
    T1,
    Worker,
    commit,
    content,
    expected,
    outgoing,
    receiver_of,
    recorded_push,
    worker,
)

QUICK = TransferSettings(stall_s=0.6, heartbeat_s=0.1)


class Site:
    """A worker with its hub running."""

    def __init__(
        self, worker: Worker, settings: TransferSettings = QUICK, seal: HandleSeal | None = None
    ) -> None:
        self.worker, self.inbox, self.kv = worker, worker.inbox, worker.kv
        home = worker.home
        self.hub = TransferHub(settings, home.identity, home.kv, home.worker_id, home.incarnation, seal=seal)
        self.hub.bind(worker.inbox)
        self.address = self.hub.start("127.0.0.1", 0)
        self.lent: dict[TransferId, tuple[BlockId, ...]] = {}
        self.inbox.on_push_ended = lambda transfer_id: self.kv.lock(self.lent[transfer_id])
        self.inbox.on_send_ended = lambda transfer_id: self.kv.lock(self.lent[transfer_id])

    @property
    def receiver(self) -> Receiver:
        return receiver_of(self.worker.home, self.address)

    def reserve(self, blocks: Sequence[int], transfer_id: TransferId = T1) -> None:
        reservation = expected(blocks, transfer_id=transfer_id)
        self.lent[transfer_id] = reservation.blocks
        self.hub.expect(reservation)

    def send(
        self, blocks: Sequence[int], receiver: Receiver, transfer_id: TransferId = T1, tenant: bytes = b""
    ) -> None:
        for block in blocks:
            self.kv.fill(BlockId(block), content(block))
        push = replace(outgoing(blocks, [receiver], transfer_id=transfer_id), tenant=tenant)
        self.lent[transfer_id] = push.blocks
        self.hub.send(push)

    def push_error(self, transfer_id: TransferId = T1) -> str:
        assert self.inbox.wait_until(lambda: transfer_id in self.inbox.push_errors)
        (error,) = self.inbox.push_errors[transfer_id]
        return error

    def send_error(self, transfer_id: TransferId = T1) -> str:
        assert self.inbox.wait_until(lambda: transfer_id in self.inbox.send_errors)
        (error,) = self.inbox.send_errors[transfer_id]
        return error


@pytest.fixture
def sites() -> Iterator[Callable[..., Site]]:
    built: list[Site] = []

    def build(name: str, **kwargs: Any) -> Site:
        built.append(Site(worker(name), **kwargs))
        return built[-1]

    yield build
    for site in built:
        assert site.hub.stop(10)
        assert site.kv.violations == []
        for ended in (site.inbox.push_errors, site.inbox.send_errors):
            assert all(len(errors) == 1 for errors in ended.values())


def test_a_sequence_crosses_the_wire(sites: Callable[..., Site]) -> None:
    p, d = sites("p"), sites("d")
    d.reserve([9, 4, 6])
    p.send([1, 2, 3], d.receiver)
    p.hub.progress(T1, 7)
    p.hub.finish(T1, commit(10))
    assert (p.send_error(), d.push_error()) == ("", "")
    assert [d.kv.block(BlockId(block)) for block in (9, 4, 6)] == [p.kv.block(BlockId(block)) for block in (1, 2, 3)]
    assert d.inbox.commits[T1][0].choices == commit(10).choices


def test_many_at_once_in_both_directions(sites: Callable[..., Site]) -> None:
    """A mixed worker receives and sends at the same time."""
    a, b = sites("a"), sites("b")
    ids = [TransferId(f"m{number}") for number in range(16)]
    for number, transfer_id in enumerate(ids):
        source, target = (a, b) if number % 2 else (b, a)
        target.reserve([number + 16], transfer_id)
        source.send([number], target.receiver, transfer_id)
        source.hub.finish(transfer_id, commit(4))
    for number, transfer_id in enumerate(ids):
        source, target = (a, b) if number % 2 else (b, a)
        assert (source.send_error(transfer_id), target.push_error(transfer_id)) == ("", "")
        assert target.kv.block(BlockId(number + 16)) == source.kv.block(BlockId(number))


def test_hnd_01_a_close_in_mid_push(sites: Callable[..., Site]) -> None:
    p, d = sites("p"), sites("d")
    d.reserve([9, 4])
    p.send([1, 2], d.receiver)
    p.hub.progress(T1, 4)
    d.hub.close(T1)
    assert d.push_error() == "closed by the receiving engine"
    p.hub.finish(T1, commit(8))
    assert p.send_error() in ("closed by the receiving engine", "transfer t1 has ended already")
    assert d.kv.is_poisoned(BlockId(4))


def test_an_abort_reaches_the_receiver(sites: Callable[..., Site]) -> None:
    p, d = sites("p"), sites("d", settings=TransferSettings(stall_s=60))
    d.inbox.answer = None
    d.reserve([9, 4])
    p.send([1, 2], d.receiver)
    p.hub.progress(T1, 4)
    p.hub.abort_send(T1)
    assert p.send_error() == "aborted by the sending engine"
    d.hub.close(T1)
    assert d.push_error() in ("the Push broke off before its commit", "closed by the receiving engine")


def test_refusals_arrive_with_their_reason(sites: Callable[..., Site]) -> None:
    p, d = sites("p"), sites("d")
    p.send([1], d.receiver)
    assert p.send_error() == "transfer t1 is unknown here"
    t2 = TransferId("t2")
    p.send([2], replace(d.receiver, incarnation=Incarnation("d-0")), t2)
    assert p.send_error(t2) == "incarnation: this is d-1 != pushed to d-0"
    t3 = TransferId("t3")
    d.inbox.answer = False
    d.reserve([9], t3)
    p.send([3], d.receiver, t3)
    p.hub.finish(t3, commit(4))
    assert p.send_error(t3) == "the receiving engine has given this request up"


def test_a_receiver_that_is_gone_is_noticed(sites: Callable[..., Site]) -> None:
    p, d = sites("p"), sites("d")
    d.reserve([9, 4])
    p.send([1, 2], d.receiver)
    p.hub.progress(T1, 4)
    assert d.hub.stop(10)
    assert d.push_error() in ("the transfer side is stopping", "the Push broke off before its commit")
    assert p.send_error() != ""
    t2 = TransferId("t2")
    p.send([3], d.receiver, t2)
    assert p.send_error(t2).startswith("lost d: unavailable")


def test_an_address_that_swallows_everything_is_given_up(sites: Callable[..., Site]) -> None:
    """A listener that accepts connections and says nothing: a stopped process."""
    p = sites("p")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        p.send([1], receiver_of(worker("d").home, f"127.0.0.1:{listener.getsockname()[1]}"))
        assert p.send_error() == "d took no data for 0.6 s"


def test_after_stop_everything_ends_at_once(sites: Callable[..., Site]) -> None:
    p, d = sites("p"), sites("d")
    d.reserve([9])
    assert p.hub.stop(10)
    assert d.hub.stop(10)
    assert d.push_error() == "the transfer side is stopping"
    t2 = TransferId("t2")
    d.reserve([4], t2)
    p.send([1], d.receiver, t2)
    p.hub.progress(t2, 4)
    assert d.push_error(t2) == p.send_error(t2) == "the transfer side is stopping"


def test_a_taken_port_is_an_error(sites: Callable[..., Site]) -> None:
    d = sites("d")
    other = worker("e")
    hub = TransferHub(QUICK, IDENTITY, other.kv, other.name, Incarnation("e-1"))
    hub.bind(other.inbox)
    with pytest.raises(OSError, match=r"cannot listen on 127\.0\.0\.1"):
        hub.start("127.0.0.1", int(d.address.rpartition(":")[2]))
    assert hub.stop(10)


class Raw:
    """A sender by hand, for what the real one would never send."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def push(self, messages: Sequence[pb.PushFrame], *, half_close: bool = True) -> pb.PushResult:
        async with open_channel(self.address) as channel:
            call = pb_grpc.KvTransferStub(channel).Push(timeout=20)
            try:
                for message in messages:
                    await call.write(message)
                if half_close:
                    await call.done_writing()
            except grpc.aio.AioRpcError:
                pass  # answered before all was said: the answer tells why
            return await call


async def test_corruption_and_duplicates_on_the_wire(sites: Callable[..., Site]) -> None:
    d = sites("d")
    loop = asyncio.get_running_loop()
    frames = await loop.run_in_executor(None, lambda: run_virtual(recorded_push([1, 2, 3])))
    messages = [frame_to_pb(frame) for frame in frames]
    raw = Raw(d.address)

    d.reserve([9, 4, 6])
    result = await raw.push([messages[0], messages[1], messages[1]])
    assert result.error == "slab out of order: expected 1, got 0"
    result = await raw.push(messages)
    assert (result.error, result.retryable) == ("transfer t1 has ended already", False)
    assert d.push_error() == "slab out of order: expected 1, got 0"

    t2 = TransferId("t2")
    d.reserve([10, 11, 12], t2)
    messages[0].open.transfer_id = "t2"
    messages[2].slab.checksum ^= 1
    result = await raw.push(messages[:3])
    assert "slab 1 is corrupt" in result.error
    assert result.retryable
    assert d.kv.is_poisoned(BlockId(11))

    assert (await raw.push([pb.PushFrame()])).error.startswith("a push frame of an unknown kind")
    assert (await raw.push([])).error == "the Push ended without a commit"


async def test_a_sender_that_falls_silent_or_dies(sites: Callable[..., Site]) -> None:
    d = sites("d")
    frames = await asyncio.get_running_loop().run_in_executor(None, lambda: run_virtual(recorded_push([1, 2, 3])))
    messages = [frame_to_pb(frame) for frame in frames]
    d.reserve([9, 4, 6])
    result = await Raw(d.address).push(messages[:2], half_close=False)
    assert result.error == "stalled: no frame for 0.6 s"

    t2 = TransferId("t2")
    d.reserve([10, 11, 12], t2)
    messages[0].open.transfer_id = "t2"
    channel = open_channel(d.address)
    call = pb_grpc.KvTransferStub(channel).Push(timeout=20)
    written = threading.Event()
    d.kv.on_write = written.set
    await call.write(messages[0])
    await call.write(messages[1])
    assert await asyncio.get_running_loop().run_in_executor(None, written.wait, 20)
    await channel.close()
    ended = await asyncio.get_running_loop().run_in_executor(None, d.push_error, t2)
    assert ended in ("the Push broke off before its commit", "the Push ended without a commit")
    assert d.kv.is_poisoned(BlockId(11))


async def test_a_message_over_the_limit_ends_its_push_alone(sites: Callable[..., Site]) -> None:
    d = sites("d")
    huge = pb.PushFrame(slab=pb.PushSlab(payload=bytes(5 << 20)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await Raw(d.address).push([huge])
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    d.reserve([9])
    d.hub.close(T1)
    assert await asyncio.get_running_loop().run_in_executor(None, d.push_error) == "closed by the receiving engine"


class Echo(worker_pb2_grpc.WorkerServicer):
    async def Attach(self, request_iterator: Any, context: Any) -> Any:
        async for _ in request_iterator:
            yield worker_pb2.WorkerMessage(beat=worker_pb2.Load(num_blocks=1))


async def test_streams_on_the_main_loop_go_on_while_pushes_run_on_theirs(sites: Callable[..., Site]) -> None:
    """grpc.aio on three event loops of one process at the same time."""
    p, d = sites("p"), sites("d")
    server = new_server()
    worker_pb2_grpc.add_WorkerServicer_to_server(Echo(), server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    ids = [TransferId(f"s{number}") for number in range(40)]

    def push_all() -> None:
        for transfer_id in ids:
            d.reserve([], transfer_id)
            p.send([], d.receiver, transfer_id)
            p.hub.finish(transfer_id, commit(0))
        assert [p.send_error(transfer_id) for transfer_id in ids] == [""] * len(ids)

    pushing = threading.Thread(target=push_all)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Attach(timeout=60)
        pushing.start()
        for _ in range(200):
            await call.write(worker_pb2.RouterMessage(beat=worker_pb2.RouterBeat()))
            assert (await call.read()).beat.num_blocks == 1
        await asyncio.get_running_loop().run_in_executor(None, pushing.join)
        call.cancel()
    await server.stop(None)
    assert [d.push_error(transfer_id) for transfer_id in ids] == [""] * len(ids)


STRANGE = "its handle was not given for this transfer and tenant"


@pytest.mark.parametrize(
    ("signed_for", "valid_ms", "tenant", "fault"),
    [
        (None, 5_000, b"acme", "it shows no handle"),
        ("t2", 5_000, b"acme", STRANGE),
        ("t1", 5_000, b"other", STRANGE),
        ("t1", -1_000, b"acme", "its handle has expired"),
        ("t1", 5_000, b"acme", ""),
    ],
)
def test_a_push_shows_the_handle_of_its_reservation(
    sites: Callable[..., Site], signed_for: str | None, valid_ms: int, tenant: bytes, fault: str
) -> None:
    """A refused one leaves the reservation alone: it goes on waiting."""
    seal = HandleSeal(FakeClock())
    p, d = sites("p"), sites("d", seal=seal)
    handle = b"" if signed_for is None else seal.sign(TransferId(signed_for), b"acme", valid_ms)
    d.reserve([9])
    p.send([1], replace(d.receiver, handle=handle), tenant=tenant)
    if not fault:
        p.hub.finish(T1, commit(4))
        assert (p.send_error(), d.push_error()) == ("", "")
        return
    assert p.send_error() == f"transfer t1 is refused: {fault}"
    assert T1 not in d.inbox.push_errors
    d.hub.close(T1)
    assert d.push_error() == "closed by the receiving engine"
