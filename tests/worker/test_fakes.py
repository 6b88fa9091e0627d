"""The fake worker tells the stories of a real one, so that tests of routers may trust it."""

from __future__ import annotations

import grpc

from kvrelay.core.placement import Role
from kvrelay.pb import common_pb2, worker_pb2, worker_pb2_grpc
from kvrelay.worker.fakes import FakeFabric, FakeWorker, expected_tokens

PROMPT = [1, 2, 3]


def start(leg: int, *, request_id: str = "r", transfer_id: str = "", max_tokens: int = 4, **extra: object) -> object:
    sampling = common_pb2.Sampling(max_tokens=max_tokens)
    return worker_pb2.RouterMessage(
        start=worker_pb2.Start(
            request_id=request_id, choices=[0], token_ids=PROMPT, num_prompt=len(PROMPT), leg=leg, sampling=sampling,
            transfer_id=transfer_id, **extra,
        )
    )


class Router:
    """Just enough of one: a stream to one worker and the events that came over it."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self.call = worker_pb2_grpc.WorkerStub(self.channel).Attach()

    async def hello(self) -> worker_pb2.Welcome:
        await self.send(worker_pb2.RouterMessage(hello=worker_pb2.Hello(router_id="router", protocol=1)))
        return (await self.call.read()).welcome

    async def send(self, message: object) -> None:
        await self.call.write(message)

    async def until_terminal(self) -> list[worker_pb2.Event]:
        events: list[worker_pb2.Event] = []
        while not any(event.WhichOneof("kind") in ("finished", "failed", "refused") for event in events):
            events += (await self.call.read()).events.events
        return events


def kinds(events: list[worker_pb2.Event]) -> list[str]:
    return [event.WhichOneof("kind") for event in events]


def token_ids(events: list[worker_pb2.Event]) -> list[int]:
    columns = [event.first_token.token if event.HasField("first_token") else event.tokens.tokens for event in events]
    return [token for column in columns for token in column.ids]


async def test_a_local_start_gives_the_tokens_the_oracle_expects() -> None:
    worker = FakeWorker(Role.DECODE)
    record = await worker.start()
    router = Router(record.address)
    assert (await router.hello()).worker_id == record.worker_id
    await router.send(start(worker_pb2.LEG_LOCAL))
    events = await router.until_terminal()
    assert kinds(events) == ["first_token", "tokens", "tokens", "tokens", "finished"]
    assert token_ids(events) == expected_tokens(PROMPT, 4)
    assert events[-1].finished.reason == "length"
    await router.channel.close()
    await worker.stop()


async def test_two_fakes_relay_over_the_fabric() -> None:
    fabric = FakeFabric()
    prefill, decode = FakeWorker(Role.PREFILL, fabric), FakeWorker(Role.DECODE, fabric)
    to_prefill, to_decode = Router((await prefill.start()).address), Router((await decode.start()).address)
    await to_prefill.hello()
    await to_decode.hello()
    await to_decode.send(start(worker_pb2.LEG_RECEIVE, transfer_id="t"))
    reserved = (await to_decode.call.read()).events.events[0].reserved
    await to_prefill.send(start(worker_pb2.LEG_SEND, transfer_id="t", receivers=reserved.receivers))
    sent, received = await to_prefill.until_terminal(), await to_decode.until_terminal()
    assert kinds(sent) == ["first_token", "finished"]
    assert sent[-1].finished.reason == "handed_off"
    assert kinds(received) == ["committed", "tokens", "tokens", "tokens", "finished"]
    assert list(received[0].committed.tokens.ids) + token_ids(received[1:]) == expected_tokens(PROMPT, 4)
    assert prefill.num_held == decode.num_held == 0
    for end in (to_prefill, to_decode):
        await end.channel.close()
    await prefill.stop()
    await decode.stop()


async def test_a_broken_push_fails_both_legs() -> None:
    fabric = FakeFabric()
    prefill, decode = FakeWorker(Role.PREFILL, fabric), FakeWorker(Role.DECODE, fabric)
    to_prefill, to_decode = Router((await prefill.start()).address), Router((await decode.start()).address)
    await to_prefill.hello()
    await to_decode.hello()
    prefill.fail_transfer()
    await to_decode.send(start(worker_pb2.LEG_RECEIVE, transfer_id="t"))
    await to_decode.call.read()
    await to_prefill.send(start(worker_pb2.LEG_SEND, transfer_id="t"))
    assert (await to_prefill.until_terminal())[-1].failed.reason == "transfer"
    assert (await to_decode.until_terminal())[-1].failed.reason == "transfer"
    for end in (to_prefill, to_decode):
        await end.channel.close()
    await prefill.stop()
    await decode.stop()


async def test_refusals_and_cancels_are_terminal() -> None:
    worker = FakeWorker(Role.DECODE)
    router = Router((await worker.start()).address)
    await router.hello()
    worker.refuse("no_room", retry_after_ms=7)
    await router.send(start(worker_pb2.LEG_LOCAL, request_id="refused"))
    assert (await router.until_terminal())[0].refused.retry_after_ms == 7
    worker.stall()
    await router.send(start(worker_pb2.LEG_LOCAL, request_id="stuck"))
    await router.send(worker_pb2.RouterMessage(cancel=worker_pb2.Cancel(request_id="stuck")))
    assert (await router.until_terminal())[-1].failed.reason == "cancelled"
    assert worker.num_open == worker.num_held == 0
    await router.channel.close()
    await worker.stop()


async def test_death_ends_the_stream() -> None:
    worker = FakeWorker(Role.DECODE)
    router = Router((await worker.start()).address)
    await router.hello()
    await router.send(start(worker_pb2.LEG_LOCAL, max_tokens=1000))
    await worker.die()
    assert await router.call.code() is not grpc.StatusCode.OK
    await router.channel.close()
