"""A prefill and a decode worker in this process, with Model T, and a router between them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kvrelay.core.clock import SystemClock
from kvrelay.core.config import Config, EngineSettings, LinkSettings, ModelSettings, WorkerSettings
from kvrelay.core.events import FirstToken, Tokens
from kvrelay.core.request import Start
from kvrelay.engine.engine import Engine
from kvrelay.engine.fakes import FakeTransfer, RecordingOutbox
from kvrelay.engine.spec import EngineSpec
from kvrelay.model.load import load
from kvrelay.worker.process import WorkerProcess
from tests.support.empty import assert_worker_is_empty
from tests.worker.mini_router import Attached, MiniRouter

CONFIG = Config(
    model=ModelSettings(dtype="float32"),
    engine=EngineSettings(num_blocks=64, max_batch_tokens=32),
    link=LinkSettings(beat_s=0.1, silence_s=20.0),
    worker=WorkerSettings(threads=1),
)


@dataclass
class Pair:
    prefill: WorkerProcess
    decode: WorkerProcess
    router: MiniRouter

    async def assert_empty(self) -> None:
        await self.router.prefill.until_idle()
        await self.router.decode.until_idle()
        assert_worker_is_empty(self.prefill.engine)
        assert_worker_is_empty(self.decode.engine)


def with_role(config: Config, role: str) -> Config:
    return replace(config, worker=replace(config.worker, role=role))


@asynccontextmanager
async def pair(directory: Path, config: Config = CONFIG) -> AsyncIterator[Pair]:
    prefill = WorkerProcess(with_role(config, "prefill"), directory)
    decode = WorkerProcess(with_role(config, "decode"), directory)
    try:
        to_prefill = await Attached((await prefill.start()).address).attach()
        to_decode = await Attached((await decode.start()).address).attach()
        yield Pair(prefill, decode, MiniRouter(to_prefill, to_decode))
        await to_prefill.close()
        await to_decode.close()
    finally:
        await prefill.stop()
        await decode.stop()


def plain_greedy(directory: Path, start: Start) -> list[int]:
    """The same engine and model without any process, stream or transfer around them."""
    model = load(directory, CONFIG.model, CONFIG.engine, threads=1)
    spec = EngineSpec(
        model.num_blocks, model.layout.block_size, model.max_context, model.eos_token_ids, "plain", model.dtype
    )
    outbox = RecordingOutbox()
    engine = Engine(CONFIG.engine, spec, model.runner, FakeTransfer(), outbox, SystemClock())
    engine.submit(start)
    while engine.step():
        pass
    output: list[int] = []
    for event in outbox.events:
        if isinstance(event, FirstToken):
            output.append(event.token.token_id)
        elif isinstance(event, Tokens):
            output += [token.token_id for token in event.tokens]
    return output


