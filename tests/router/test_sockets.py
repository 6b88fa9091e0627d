"""A whole router over real sockets, with fake workers behind it and gRPC in front."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvrelay.core.clock import SystemClock
from kvrelay.core.config import Config, LinkSettings, PlacementSettings, RouterSettings
from kvrelay.core.errors import BadRequest, ConfigError, DeadlineExceeded, KvrelayError, UnknownModel
from kvrelay.core.placement import Load, Role
from kvrelay.pb import inference_pb2 as pb
from kvrelay.pb import inference_pb2_grpc
from kvrelay.placement.memory import MemoryRegistry
from kvrelay.router.public_server import PublicServer
from kvrelay.router.router import Router
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.status import error_from_call
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.worker.fakes import FakeFabric, FakeWorker, expected_tokens
from tests.support.tiny import write_tokenizer

CONFIG = Config(
    link=LinkSettings(beat_s=0.05, silence_s=0.6),
    placement=PlacementSettings(renew_s=0.1, lease_s=2.0),
    router=RouterSettings(max_waiting_s=5.0),
)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  (the other side is a socket away, nothing signals it)
            await asyncio.sleep(0.01)


class House:
    """Workers that share a fabric, a router that knows them by address, a gRPC server in front."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.fabric = FakeFabric()
        self.workers: list[FakeWorker] = []
        self.registry = MemoryRegistry(CONFIG.placement, SystemClock())
        self.tokenizer = tokenizer
        self.router: Router
        self.stub: inference_pb2_grpc.InferenceStub

    async def worker(self, role: Role, **settings: object) -> FakeWorker:
        worker = FakeWorker(role, self.fabric, beat_s=0.05, **settings)  # type: ignore[arg-type]
        await worker.start()
        self.workers.append(worker)
        return worker

    async def generate(self, prompt: list[int], **options: object) -> list[pb.GenerateEvent]:
        message = pb.GenerateRequest(ids=pb.TokenIds(ids=prompt), options=pb.Options(**options))  # type: ignore[arg-type]
        return [event async for event in self.stub.Generate(message)]

    async def fails(self, call: Awaitable[object]) -> KvrelayError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return error_from_call(caught.value)

    async def assert_empty(self) -> None:
        await until(lambda: all(worker.num_open == 0 for worker in self.workers))
        assert self.router.fleet.num_legs == 0
        assert self.router.num_inflight == 0


Build = Callable[..., Awaitable[House]]


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Build]:
    write_tokenizer(tmp_path)
    async with asyncio.timeout(30):
        async with _houses(Tokenizer.from_directory(tmp_path)) as build:
            yield build


@asynccontextmanager
async def _houses(tokenizer: Tokenizer) -> AsyncIterator[Build]:
    house = House(tokenizer)
    closers: list[Callable[[], Awaitable[object]]] = []

    async def build(
        prefill: int = 1, decode: int = 1, *, ready: bool = True, config: Config = CONFIG, **settings: object
    ) -> House:
        for role, number in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for index in range(number):
                await house.worker(role, worker_id=f"{role.value}-{index}", **settings)
        addresses = [worker.record.address for worker in house.workers if worker.record is not None]
        house.router = Router(config, tokenizer, house.registry, static_workers=addresses)
        await house.router.start()
        server = PublicServer(house.router)
        port = await server.start("127.0.0.1", 0)
        channel = open_channel(f"127.0.0.1:{port}", public=True)
        house.stub = inference_pb2_grpc.InferenceStub(channel)
        closers.extend([lambda: channel.close(None), lambda: server.stop(0), house.router.stop, house.registry.close])
        if ready:
            await until(lambda: house.router.readiness().ready)
        return house

    try:
        yield build
    finally:
        for close in closers:
            await close()
        for worker in house.workers:
            await worker.stop()


def ids_of(events: list[pb.GenerateEvent]) -> list[int]:
    ids: list[int] = []
    for event in events:
        if event.WhichOneof("kind") == "delta":
            assert event.delta.first_index == len(ids)
            ids += event.delta.tokens.ids
    return ids


async def test_a_request_goes_all_the_way(house: Build) -> None:
    home = await house()
    events = await home.generate([1, 2, 3], max_tokens=6, temperature=0.0)
    assert ids_of(events) == expected_tokens([1, 2, 3], 6)
    kinds = [event.WhichOneof("kind") for event in events]
    assert (kinds[0], kinds[-2:]) == ("started", ["finish", "summary"])
    assert events[-1].summary.mode == "relay"
    assert events[0].started.model == "fake"
    await home.assert_empty()


async def test_decode_dies_in_mid_stream(house: Build) -> None:
    home = await house(decode=2, step_s=0.02)
    message = pb.GenerateRequest(
        ids=pb.TokenIds(ids=[5, 6]), options=pb.Options(max_tokens=40, temperature=0.0, n=1)
    )
    events: list[pb.GenerateEvent] = []
    async for event in home.stub.Generate(message):
        events.append(event)
        if len(events) == 8:
            [serving] = [worker for worker in home.workers[1:] if worker.num_open]
            await serving.die()
            home.workers.remove(serving)
    assert ids_of(events) == expected_tokens([5, 6], 40)
    assert events[-1].summary.num_attempts == 2
    await home.assert_empty()


async def test_a_client_that_leaves_frees_both_workers(house: Build) -> None:
    home = await house(step_s=0.02)
    message = pb.GenerateRequest(ids=pb.TokenIds(ids=[5]), options=pb.Options(max_tokens=400))
    call = home.stub.Generate(message)
    async for event in call:
        if event.WhichOneof("kind") == "delta" and event.delta.first_index >= 3:
            break
    call.cancel()
    await until(lambda: home.router.num_inflight == 0)
    await home.assert_empty()
    [cancel] = home.workers[1].cancels
    assert list(cancel.choices) == []


async def test_cancels_that_race_with_everything_leave_no_slot_taken(house: Build) -> None:
    home = await house(prefill=2, decode=2, step_s=0.002)
    dice = random.Random(7)

    async def impatient(index: int) -> None:
        call = home.stub.Generate(
            pb.GenerateRequest(ids=pb.TokenIds(ids=[index % 250]), options=pb.Options(max_tokens=60))
        )
        try:
            async with asyncio.timeout(dice.random() * 0.2):
                async for _ in call:
                    pass
        except TimeoutError:
            call.cancel()

    await asyncio.gather(*(impatient(index) for index in range(150)))
    await until(lambda: home.router.num_inflight == 0)
    await home.assert_empty()
    answers = await asyncio.gather(*(home.generate([index], max_tokens=8, temperature=0.0) for index in range(20)))
    assert [ids_of(events) for events in answers] == [expected_tokens([index], 8) for index in range(20)]


async def test_thirty_two_streams_at_once(house: Build) -> None:
    home = await house()
    prompts = [[index, index + 1, index + 2] for index in range(32)]
    answers = await asyncio.gather(*(home.generate(prompt, max_tokens=12, temperature=0.0) for prompt in prompts))
    for prompt, events in zip(prompts, answers, strict=True):
        assert ids_of(events) == expected_tokens(prompt, 12)
    await home.assert_empty()


async def test_silence_ends_a_stream_and_the_link_comes_back(house: Build) -> None:
    home = await house(prefill=0, decode=1, step_s=0.02)
    worker = home.workers[0]
    streaming = asyncio.ensure_future(home.generate([9, 9], max_tokens=60, temperature=0.0))
    await until(lambda: worker.num_open == 1)
    worker.silent = True
    await until(lambda: not home.router.readiness().ready)
    worker.silent = False
    events = await streaming
    assert ids_of(events) == expected_tokens([9, 9], 60)
    await home.assert_empty()


async def test_another_process_at_the_same_address_is_another_worker(house: Build) -> None:
    home = await house(prefill=0, decode=1)
    old = home.workers[0]
    assert old.record is not None
    port = int(old.record.address.rpartition(":")[2])
    await old.die()
    await until(lambda: not home.router.readiness().ready)
    new = FakeWorker(Role.DECODE, home.fabric, worker_id="decode-0", beat_s=0.05)
    record = await new.start(port)
    home.workers[0] = new
    await until(lambda: home.router.readiness().ready)
    [view] = home.router.fleet.snapshot().workers
    assert view.record.incarnation == record.incarnation
    assert ids_of(await home.generate([1], max_tokens=3, temperature=0.0)) == expected_tokens([1], 3)


async def test_workers_come_and_go_through_the_registry(house: Build) -> None:
    home = await house(0, 0, ready=False)
    assert home.router.readiness().reason == "no worker is attached"
    worker = await home.worker(Role.MIXED)
    assert worker.record is not None
    await home.registry.register(worker.record, Load())
    await until(lambda: home.router.readiness().ready)
    assert ids_of(await home.generate([1], max_tokens=3, temperature=0.0)) == expected_tokens([1], 3)
    await home.registry.leave(worker.record)
    assert ids_of(await home.generate([2], max_tokens=3, temperature=0.0)) == expected_tokens([2], 3)
    assert home.router.readiness().ready, "an attached worker stays until its stream ends"
    await worker.die()
    home.workers.clear()
    await until(lambda: not home.router.fleet.snapshot().workers)


async def test_one_worker_under_two_addresses_is_attached_once(
    house: Build, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="kvrelay.router.links")
    home = await house(prefill=0, decode=1)
    record = home.workers[0].record
    assert record is not None
    port = record.address.rpartition(":")[2]
    twin = Router(CONFIG, home.tokenizer, home.registry, static_workers=[record.address, f"localhost:{port}"])
    await twin.start()
    await until(lambda: twin.readiness().ready and "already attached by another address" in caplog.text)
    assert len(twin.fleet.snapshot().workers) == 1
    await twin.stop()


async def test_errors_have_their_status(house: Build) -> None:
    home = await house()
    home.workers[1].max_context = 64

    async def ask(**fields: object) -> list[pb.GenerateEvent]:
        message = pb.GenerateRequest(**fields)  # type: ignore[arg-type]
        return [event async for event in home.stub.Generate(message)]

    assert isinstance(await home.fails(ask(model="other", text="x")), UnknownModel)
    assert isinstance(await home.fails(ask()), BadRequest)
    error = await home.fails(ask(text="x", options=pb.Options(temperature=9.0)))
    assert error.param == "temperature"
    error = await home.fails(ask(text="x", options=pb.Options(max_tokens=5000)))
    assert error.code == "context_length_exceeded"
    error = await home.fails(ask(text="x", resume=[1, 2], options=pb.Options(n=2, seed=1)))
    assert error.param == "resume"
    error = await home.fails(ask(text="x", resume_chars=3, options=pb.Options(n=2, seed=1)))
    assert error.param == "resume"
    await home.assert_empty()


async def test_the_smaller_of_deadline_and_metadata_counts(house: Build) -> None:
    home = await house()
    home.workers[1].stall()

    async def ask(timeout_ms: str) -> list[pb.GenerateEvent]:
        message = pb.GenerateRequest(text="x", options=pb.Options(max_tokens=50))
        call = home.stub.Generate(message, timeout=20, metadata=(("kvrelay-timeout-ms", timeout_ms),))
        return [event async for event in call]

    assert isinstance(await home.fails(ask("300")), DeadlineExceeded)
    assert isinstance(await home.fails(ask("soon")), BadRequest)
    assert all(start.timeout_ms <= 300 for start in home.workers[1].starts[1:])
    home.workers[1].resume()
    await home.assert_empty()


async def test_several_choices_logprobs_and_resume(house: Build) -> None:
    home = await house()
    events = await home.generate([4, 5], max_tokens=6, seed=77, n=2, logprobs=2)
    texts = ["".join(event.delta.text for event in events if event.WhichOneof("kind") == "delta"
                     and event.delta.choice == choice) for choice in range(2)]
    assert texts[0] != texts[1]
    first = [event.delta for event in events if event.WhichOneof("kind") == "delta" and event.delta.choice == 0]
    assert all(len(delta.tokens.logprobs) == len(delta.tokens.ids) for delta in first)
    whole = [token_id for delta in first for token_id in delta.tokens.ids]
    message = pb.GenerateRequest(
        ids=pb.TokenIds(ids=[4, 5]), options=pb.Options(max_tokens=6, seed=77), resume=whole[:4]
    )
    rest = [event async for event in home.stub.Generate(message)]
    assert [i for event in rest if event.WhichOneof("kind") == "delta" for i in event.delta.tokens.ids] == whole[4:]


async def test_chat_models_and_tokens(house: Build) -> None:
    home = await house()
    chat = pb.ChatRequest(
        messages=[pb.ChatMessage(role="user", content="hi")], options=pb.Options(max_tokens=4, temperature=0.0)
    )
    events = [event async for event in home.stub.Chat(chat)]
    assert len(ids_of(events)) == 4
    [model] = (await home.stub.ListModels(pb.ListModelsRequest())).models
    assert (model.id, model.max_context) == ("fake", 4096)
    ids = (await home.stub.Tokenize(pb.TokenizeRequest(text="hello"))).ids
    assert (await home.stub.Detokenize(pb.DetokenizeRequest(ids=ids))).text.endswith("hello")


async def test_what_takes_long_is_done_beside_the_loop(house: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    home = await house()
    threads: dict[str, bool] = {}
    for name in ("encode", "decode"):
        honest = getattr(Tokenizer, name)

        def watched(self: Tokenizer, *args: Any, name: str = name, honest: Any = honest, **kwargs: Any) -> Any:
            threads[name] = threading.current_thread() is threading.main_thread()
            return honest(self, *args, **kwargs)

        monkeypatch.setattr(Tokenizer, name, watched)
    for size, on_loop in ((10, True), (200_000, False)):
        ids = [97] * size
        assert (await home.stub.Detokenize(pb.DetokenizeRequest(ids=ids))).text == "a" * size
        assert threads["decode"] is on_loop
    await home.stub.Tokenize(pb.TokenizeRequest(text="a" * 10))
    assert threads["encode"]
    await home.stub.Tokenize(pb.TokenizeRequest(text="a" * 40_000))
    assert not threads["encode"]


async def test_a_draining_router_lets_streams_finish_and_takes_none(house: Build) -> None:
    home = await house(step_s=0.01)
    streaming = asyncio.ensure_future(home.generate([3], max_tokens=30, temperature=0.0))
    await until(lambda: home.workers[1].num_open == 1)
    draining = asyncio.ensure_future(home.router.drain(10))
    await until(lambda: not home.router.readiness().ready)
    assert (await home.fails(home.generate([3], max_tokens=3))).code == "unavailable"
    assert ids_of(await streaming) == expected_tokens([3], 30)
    await draining


async def test_stopping_with_streams_under_way_tells_them_and_leaves_nothing(house: Build) -> None:
    home = await house(step_s=0.01)
    streaming = asyncio.ensure_future(home.generate([3], max_tokens=4000))
    await until(lambda: home.workers[1].num_open == 1)
    await home.router.stop()
    assert (await home.fails(streaming)).code == "unavailable"
    await home.assert_empty()


async def test_a_taken_port_names_its_flag(house: Build) -> None:
    home = await house()
    server = PublicServer(home.router)
    port = await server.start("127.0.0.1", 0)
    other = PublicServer(home.router)
    with pytest.raises(ConfigError, match="--grpc-port"):
        await other.start("127.0.0.1", port)
    await server.stop(0)
    await other.stop(0)


async def test_a_request_waits_for_the_first_worker_to_come(house: Build) -> None:
    whole = await house(0, 0, ready=False)
    asking = asyncio.ensure_future(whole.generate([97, 98], max_tokens=4, temperature=0.0))
    await until(lambda: whole.router.num_inflight == 1)
    worker = await whole.worker(Role.DECODE)
    assert worker.record is not None
    await whole.registry.register(worker.record, Load())
    deltas = [event.delta.tokens.ids for event in await asking if event.HasField("delta")]
    assert [token for ids in deltas for token in ids] == expected_tokens([97, 98], 4)
    await whole.assert_empty()
