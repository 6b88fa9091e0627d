"""The relay without Ray: router, prefill and two decode workers as plain processes, Model T in float32.

Killed means kill -9 of the process, and the stream must go on as if nothing had been.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.core.handoff import PROTOCOL_VERSION
from kvrelay.pb import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from kvrelay.rpc.channel import open_channel
from tests.support.tiny import write_model_t

pytestmark = pytest.mark.slow

PROMPT = list(b"once upon a time there was a router")
LONG_PROMPT = [97 + (index * index) % 26 for index in range(200)]
STEPS = "engine: {max_batch_tokens: 64}\n"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  (another process, seen from outside)
            await asyncio.sleep(0.02)


class Processes:
    """Every process of one test, by name. `stop` leaves none."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = write_model_t(directory / "model-t")
        self.config = directory / "kvrelay.yaml"
        self.config.write_text(STEPS)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.ready: dict[str, dict[str, Any]] = {}

    def launch(self, name: str, command: str, *flags: str) -> None:
        log = (self.directory / f"{name}.log").open("wb")
        arguments = ["--model", str(self.model), "--config", str(self.config), *flags,
                     "--ready-file", str(self.directory / f"{name}.json")]
        with log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "kvrelay.cli.main", command, *arguments], stdout=log, stderr=log
            )

    def launch_worker(self, name: str, role: str) -> None:
        self.launch(name, "worker", "--role", role, "--id", name, "--dtype", "float32", "--num-blocks", "1024",
                    "--threads", "1", "--served-name", "tiny")

    async def wait_ready(self, *names: str) -> None:
        for name in names:
            file = self.directory / f"{name}.json"
            await until(lambda file=file, name=name: file.exists() or self.died(name))  # type: ignore[misc]
            self.ready[name] = json.loads(file.read_text())

    def died(self, name: str) -> bool:
        assert self.running[name].poll() is None, (self.directory / f"{name}.log").read_text()
        return False

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        process.wait(10)

    def stop(self) -> dict[str, int]:
        """Exit codes after SIGTERM."""
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        codes = {name: process.wait(30) for name, process in self.running.items()}
        self.running.clear()
        return codes

    async def load(self, name: str) -> worker_pb2.Load:
        """Asked as a router would ask."""
        async with open_channel(self.ready[name]["address"]) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Attach()  # type: ignore[no-untyped-call]
            hello = worker_pb2.Hello(router_id="inspector", protocol=PROTOCOL_VERSION)
            await call.write(worker_pb2.RouterMessage(hello=hello))
            welcome = (await call.read()).welcome
            call.cancel()
            return welcome.load

    async def reserved(self, *names: str) -> None:
        """Until one of them holds blocks for a transfer that has not come."""
        async with asyncio.timeout(10):
            while not any([(await self.load(name)).num_reserved for name in names]):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def holder(self, *names: str) -> str:
        """The one that has kept KV of an ended stream, once all of it is released."""
        async with asyncio.timeout(10):
            while True:
                loads = {name: await self.load(name) for name in names}
                kept = [name for name, load in loads.items() if load.num_cached]
                if kept and all(map(is_empty, loads.values())):
                    return kept[0]
                await asyncio.sleep(0.02)

    async def assert_workers_are_empty(self) -> None:
        for name in self.running:
            if name == "router":
                continue
            async with asyncio.timeout(10):
                while not is_empty(load := await self.load(name)):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert load.num_free + load.num_cached == load.num_blocks


def is_empty(load: worker_pb2.Load) -> bool:
    busy = (load.num_held, load.num_draining, load.num_running, load.num_waiting, load.num_reserved, load.num_sending)
    return not any(busy)


@asynccontextmanager
async def relay(directory: Path) -> AsyncIterator[Processes]:
    processes = Processes(directory)
    workers = {"prefill": "prefill", "decode-a": "decode", "decode-b": "decode"}
    try:
        for name, role in workers.items():
            processes.launch_worker(name, role)
        await processes.wait_ready(*workers)
        addresses = ",".join(processes.ready[name]["address"] for name in workers)
        processes.launch("router", "router", "--http-port", "0", "--grpc-port", "0", "--workers", addresses)
        await processes.wait_ready("router")
        async with httpx.AsyncClient(base_url=processes.ready["router"]["http"]) as http, asyncio.timeout(60):
            while (await http.get("/readyz")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield processes
        codes = processes.stop()
        assert set(codes.values()) == {0}, codes
    finally:
        for name in list(processes.running):
            processes.kill(name)


class Stream:
    """One greedy gRPC stream; `kill_at` is called once so many tokens have arrived."""

    def __init__(self, processes: Processes, prompt: list[int], max_tokens: int, session: str = "") -> None:
        self._target = processes.ready["router"]["grpc"]
        options = inference_pb2.Options(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._message = inference_pb2.GenerateRequest(
            ids=inference_pb2.TokenIds(ids=prompt), options=options, session_id=session
        )
        self.ids: list[int] = []
        self.text = ""
        self.summary = inference_pb2.SummaryEvent()

    async def run(self, at: int = -1, then: Callable[[], None] = lambda: None) -> list[int]:
        async with open_channel(self._target, public=True) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            pending = at >= 0
            async for event in stub.Generate(self._message, timeout=60):
                kind = event.WhichOneof("kind")
                if kind == "delta":
                    assert event.delta.first_index == len(self.ids), "an index was missed or repeated"
                    self.ids += event.delta.tokens.ids
                    self.text += event.delta.text
                elif kind == "summary":
                    self.summary = event.summary
                if pending and len(self.ids) >= at:
                    pending = False
                    then()
        return self.ids


async def test_http_and_grpc_give_the_same_and_thirty_two_streams_leave_nothing(tmp_path: Path) -> None:
    async with relay(tmp_path) as processes:
        stream = Stream(processes, PROMPT, 48)
        await stream.run()
        assert stream.summary.mode == "relay"
        async with httpx.AsyncClient(base_url=processes.ready["router"]["http"], timeout=60) as http:
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
            answer = (await http.post("/v1/completions", json=body)).json()
        assert answer["choices"][0]["text"] == stream.text
        assert answer["usage"]["completion_tokens"] == len(stream.ids) == 48

        prompts = [[*PROMPT, 65 + index] for index in range(32)]
        together = await asyncio.gather(*(Stream(processes, prompt, 40).run() for prompt in prompts))
        assert [len(ids) for ids in together] == [40] * 32
        for index in (0, 17, 31):
            assert await Stream(processes, prompts[index], 40).run() == together[index]
        await processes.assert_workers_are_empty()


async def test_kill_9_of_the_decode_worker_that_serves(tmp_path: Path) -> None:
    async with relay(tmp_path) as processes:
        undisturbed = await Stream(processes, PROMPT, 200, session="kill").run()
        victim = await processes.holder("decode-a", "decode-b")  # and there the session's next turn goes
        stream = Stream(processes, PROMPT, 200, session="kill")
        ids = await stream.run(at=10, then=lambda: processes.kill(victim))
        assert ids == undisturbed
        assert stream.summary.num_attempts == 2, "the killed worker was the one that served"
        await processes.assert_workers_are_empty()


async def test_kill_9_of_prefill_with_a_long_prompt(tmp_path: Path) -> None:
    async with relay(tmp_path) as processes:
        undisturbed = await Stream(processes, LONG_PROMPT, 40).run()
        processes.running["prefill"].send_signal(signal.SIGSTOP)  # it will have the request, and never finish it
        stream = Stream(processes, LONG_PROMPT, 40)
        running = asyncio.ensure_future(stream.run())
        await processes.reserved("decode-a", "decode-b")
        assert not stream.ids
        processes.kill("prefill")
        assert await running == undisturbed
        assert stream.summary.num_attempts == 2
        await processes.assert_workers_are_empty()


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_sigterm_of_a_worker_that_serves(tmp_path: Path, role: str) -> None:
    async with relay(tmp_path) as processes:
        prompts = [[*PROMPT, 65 + index] for index in range(8)]
        undisturbed = await asyncio.gather(*(Stream(processes, prompt, 200).run() for prompt in prompts))
        leaver = "prefill" if role == "prefill" else await processes.holder("decode-a", "decode-b")
        streams = [Stream(processes, prompt, 200) for prompt in prompts]
        at = 0 if role == "prefill" else 10
        first = streams[0].run(at=at, then=lambda: processes.running[leaver].send_signal(signal.SIGTERM))
        answers = await asyncio.gather(first, *(stream.run() for stream in streams[1:]))
        assert answers == undisturbed
        assert await asyncio.to_thread(processes.running.pop(leaver).wait, 30) == 0
        await processes.assert_workers_are_empty()


async def test_sigterm_of_the_router_lets_streams_finish(tmp_path: Path) -> None:
    async with relay(tmp_path) as processes:
        undisturbed = await Stream(processes, PROMPT, 200).run()
        stream = Stream(processes, PROMPT, 200)
        router = processes.running["router"]
        assert await stream.run(at=10, then=lambda: router.send_signal(signal.SIGTERM)) == undisturbed
        assert await asyncio.to_thread(processes.running.pop("router").wait, 30) == 0
        await processes.assert_workers_are_empty()
