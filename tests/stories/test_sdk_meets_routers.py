"""The SDK and real routers: the same answer from both clients, and a stream that outlives its router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient, BadRequest, Client, Delta, Event, Finished, Started, Summary
from kvrelay.core.clock import SystemClock
from kvrelay.core.config import Config, LinkSettings
from kvrelay.core.placement import Role
from kvrelay.placement.memory import MemoryRegistry
from kvrelay.router.public_server import PublicServer
from kvrelay.router.router import Router
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.worker.fakes import FakeFabric, FakeWorker
from tests.support.tiny import write_tokenizer

CONFIG = Config(link=LinkSettings(beat_s=0.05, silence_s=1.0))


class House:
    """Two workers, two routers in front of both."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stack = AsyncExitStack()
        self.workers: list[FakeWorker] = []
        self.servers: list[PublicServer] = []
        self.targets: list[str] = []

    async def __aenter__(self) -> House:
        fabric = FakeFabric()
        for role in (Role.PREFILL, Role.DECODE):
            worker = FakeWorker(role, fabric, beat_s=0.05, step_s=0.01)
            await worker.start()
            self._stack.push_async_callback(worker.stop)
            self.workers.append(worker)
        for _ in range(2):
            await self._add_router()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _add_router(self) -> None:
        addresses = [worker.record.address for worker in self.workers if worker.record is not None]
        registry = MemoryRegistry(CONFIG.placement, SystemClock())
        router = Router(CONFIG, self._tokenizer, registry, static_workers=addresses)
        await router.start()
        self._stack.push_async_callback(router.stop)
        server = PublicServer(router)
        self.targets.append(f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
        self._stack.push_async_callback(server.stop, 0)
        self.servers.append(server)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    write_tokenizer(tmp_path)
    async with asyncio.timeout(60), House(Tokenizer.from_directory(tmp_path)) as opened:
        yield opened


def ids_of(events: list[Event]) -> list[int]:
    return [token.token_id for event in events if isinstance(event, Delta) for token in event.tokens]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


async def test_both_clients_get_the_same_answer(house: House) -> None:
    async with AsyncClient(house.targets) as client:
        events = [event async for event in client.generate("hello", max_tokens=8, temperature=0.0, ignore_eos=True)]
        ids = await client.tokenize("hello", add_special_tokens=False)
        assert await client.detokenize(ids) == "hello"
        with pytest.raises(BadRequest) as raised:
            await client.generate("hello", temperature=-1.0).text()
        assert raised.value.param == "temperature"

    def ask() -> list[Event]:
        with Client(house.targets) as blocking:
            return list(blocking.generate("hello", max_tokens=8, temperature=0.0, ignore_eos=True))

    again = await asyncio.to_thread(ask)
    assert ids_of(events) == ids_of(again)
    assert len(ids_of(events)) == 8
    assert isinstance(events[0], Started)
    assert [event.finish_reason for event in events if isinstance(event, Finished)] == ["length"]
    assert isinstance(events[-1], Summary)
    assert events[-1].num_output_tokens == 8


async def test_a_stream_outlives_its_router(house: House) -> None:
    options = {"max_tokens": 40, "temperature": 1.0, "seed": 11, "ignore_eos": True}
    async with AsyncClient(house.targets) as client:
        undisturbed = [event async for event in client.generate("hello", **options)]  # type: ignore[arg-type]
        seen: list[Event] = []
        async for event in client.generate("hello", **options):  # type: ignore[arg-type]
            seen.append(event)
            if len(ids_of(seen)) == 10:
                await house.servers[0].stop(0)
    assert ids_of(seen) == ids_of(undisturbed)
    assert text_of(seen) == text_of(undisturbed)
    assert isinstance(seen[-1], Summary)
    assert seen[-1].num_resumes == 1
