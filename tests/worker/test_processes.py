"""Two `kvrelay worker` processes, Attach streams to both, Pushes between them. Marked slow: each loads torch."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cli.worker import EXIT_FAILED
from tests.worker.cluster import plain_greedy
from tests.worker.mini_router import Attached, MiniRouter, Story
from tests.worker.support import local_start

pytestmark = pytest.mark.slow

PROMPT = [256, *b"Two plain processes, one relay: the first computes the prompt, the second says the rest."]
READY_TIMEOUT_S = 60.0


class Process:
    def __init__(self, role: str, directory: Path, home: Path) -> None:
        self._arguments = [
            "worker", "--role", role, "--model", str(directory), "--dtype", "float32", "--num-blocks", "64",
            "--threads", "1", "--id", f"{role}-1", "--ready-file", str(home / f"{role}.json"),
        ]
        self._child: asyncio.subprocess.Process
        self.lines: list[str] = []
        self.record: dict[str, Any] = {}
        self._ready_file = home / f"{role}.json"
        self._config = home / f"{role}.yaml"

    async def spawn(self, settings: str = "") -> None:
        self._config.write_text("link: {silence_s: 20.0, beat_s: 0.02}\n" + settings)
        self._child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvrelay.cli.main", *self._arguments, "--config", str(self._config),
            stdout=asyncio.subprocess.PIPE,
        )

    async def start(self, settings: str = "") -> Attached:
        await self.spawn(settings)
        assert self._child.stdout is not None
        async with asyncio.timeout(READY_TIMEOUT_S):
            while not (self.lines and " ready " in self.lines[-1]):
                line = await self._child.stdout.readline()
                assert line, f"the worker ended with {await self._child.wait()}"
                self.lines.append(line.decode())
        self.record = json.loads(self._ready_file.read_text())
        return await Attached(self.record["address"]).attach()

    def has_loaded(self, library: str) -> bool:
        return library in Path(f"/proc/{self.record['pid']}/maps").read_text()

    def signal(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    async def exit_code(self) -> int:
        async with asyncio.timeout(READY_TIMEOUT_S):
            return await self._child.wait()

    async def end(self) -> None:
        if self._child.returncode is None:
            self._child.kill()
        await self._child.wait()


@asynccontextmanager
async def two_processes(
    directory: Path, home: Path, prefill_settings: str = ""
) -> AsyncIterator[tuple[Process, Process, MiniRouter]]:
    prefill, decode = Process("prefill", directory, home), Process("decode", directory, home)
    ends: list[Attached] = []
    try:
        ends = [await prefill.start(prefill_settings), await decode.start()]
        yield prefill, decode, MiniRouter(*ends)
    finally:
        for end in ends:
            await end.close()
        await prefill.end()
        await decode.end()


async def test_two_processes_relay_and_end_in_good_order(model_t: Path, tmp_path: Path) -> None:
    async with two_processes(model_t, tmp_path) as (prefill, decode, router):
        assert f"worker decode-1 ready role=decode attach={decode.record['address']}" in decode.lines[-1]
        assert "64 blocks" in decode.lines[-1]
        start = local_start("r", PROMPT, max_tokens=40)
        relayed, local = await router.relay(start), await router.local(local_start("l", PROMPT, max_tokens=40))
        assert relayed.output() == local.output() == plain_greedy(model_t, start)
        await router.prefill.until_idle()
        await router.decode.until_idle()
        assert not decode.has_loaded("_raylet")
        prefill.signal(signal.SIGTERM)
        decode.signal(signal.SIGINT)
        assert await prefill.exit_code() == await decode.exit_code() == 0


async def test_a_prefill_killed_in_mid_transfer_frees_the_decode_side(model_t: Path, tmp_path: Path) -> None:
    slow_chunks = "engine: {max_batch_tokens: 1}\n"
    async with two_processes(model_t, tmp_path, slow_chunks) as (prefill, _, router):
        start = local_start("r", PROMPT * 2, max_tokens=40)

        async def kill_half_way() -> None:
            while not 0 < router.prefill.load.waiting_tokens < len(PROMPT):
                router.prefill.load_changed.clear()
                await router.prefill.load_changed.wait()
            assert router.decode.load.num_reserved == 1
            prefill.signal(signal.SIGKILL)

        killing = asyncio.create_task(kill_half_way())
        with pytest.raises(ExceptionGroup) as ended:
            await router.relay(start)
        await killing
        assert ended.group_contains(ConnectionError)
        await router.decode.until_idle()
        canary = await router.local(local_start("canary", PROMPT))
        assert canary.output() == plain_greedy(model_t, local_start("plain", PROMPT))


async def test_a_drained_process_finishes_what_it_has(model_t: Path, tmp_path: Path) -> None:
    async with two_processes(model_t, tmp_path) as (_, decode, router):
        start = local_start("long", PROMPT, max_tokens=150)
        await router.decode.start(start)
        story = Story()
        story.see(await router.decode.next(start.request_id))
        decode.signal(signal.SIGTERM)
        while not router.decode.load.draining:
            router.decode.load_changed.clear()
            await router.decode.load_changed.wait()
        while len(story.tokens[0]) < 150:
            story.see(await router.decode.next(start.request_id))
        assert await decode.exit_code() == 0
        assert story.output() == plain_greedy(model_t, start)


async def test_a_process_that_has_failed_exits_at_once(model_t: Path, tmp_path: Path) -> None:
    process = Process("mixed", model_t, tmp_path)
    try:
        await process.spawn("engine: {max_step_ms: 1}\n")  # less than an idle engine's nap: it fails its first check
        assert await process.exit_code() == EXIT_FAILED
    finally:
        await process.end()
