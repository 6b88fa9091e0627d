"""A router with real workers in this process: what stories about whole requests live in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from kvrelay.core.clock import SystemClock
from kvrelay.core.config import Config
from kvrelay.core.ids import RequestId
from kvrelay.core.output import Delta, GenerateRequest, Summary
from kvrelay.core.request import SamplingParams
from kvrelay.placement.memory import MemoryRegistry
from kvrelay.router.http import build_app
from kvrelay.router.router import Router
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.worker.process import WorkerProcess
from tests.worker.cluster import CONFIG, with_role
from tests.worker.support import ids

NUM_TOKENS = 24


class House:
    """A router with workers of the given roles, all in this process."""

    def __init__(self, router: Router, workers: list[WorkerProcess], http: httpx.AsyncClient) -> None:
        self.router = router
        self.workers = workers
        self.http = http

    async def greedy(self, prompt: list[int], number: int, num_tokens: int = NUM_TOKENS) -> tuple[list[int], Summary]:
        request = GenerateRequest(
            RequestId(f"r{number}"), ids(prompt),
            SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
        )
        outputs = [output async for output in self.router.generate(request)]
        summary = outputs[-1]
        assert isinstance(summary, Summary)
        return [token.token_id for output in outputs if isinstance(output, Delta) for token in output.tokens], summary

    async def reply(self, path: str, body: dict[str, Any]) -> Any:
        """Without what may differ: ids and times."""
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        reply = answer.json()
        for name in ("id", "created"):
            del reply[name]
        del reply["usage"]["timing_ms"]
        return reply


@asynccontextmanager
async def house(directory: Path, *roles: str, config: Config = CONFIG) -> AsyncIterator[House]:
    async with AsyncExitStack() as owned:
        workers = [WorkerProcess(with_role(config, role), directory) for role in roles]
        addresses = []
        for worker in workers:
            owned.push_async_callback(worker.stop)
            addresses.append((await worker.start()).address)
        config = replace(config, model=replace(config.model, path=str(directory), served_name="tiny"))
        registry = MemoryRegistry(config.placement, SystemClock())
        owned.push_async_callback(registry.close)
        router = Router(config, Tokenizer.from_directory(directory), registry, static_workers=addresses)
        await router.start()
        owned.push_async_callback(router.stop)
        async with asyncio.timeout(20):
            while not (router.readiness().ready and _num_attached(router) == len(roles)):  # noqa: ASYNC110  (workers attach over sockets, nothing signals it)
                await asyncio.sleep(0.01)
        transport = httpx.ASGITransport(app=build_app(router))
        http = await owned.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://house"))
        yield House(router, workers, http)


def _num_attached(router: Router) -> int:
    """A router is ready with a decode worker alone, and would serve the first requests without the prefill worker."""
    return sum(view.attached for view in router.fleet.snapshot().workers)
