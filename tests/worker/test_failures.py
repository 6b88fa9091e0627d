"""What goes wrong inside a worker, and what its routers and its owner get to know."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.core.config import Config, PlacementSettings
from kvrelay.core.errors import ConfigError
from kvrelay.core.events import Committed, Failed, FailReason
from kvrelay.transfer import frames
from kvrelay.worker.process import WorkerProcess, advertised_host, fair_share_of_cores
from tests.worker.cluster import CONFIG, pair, plain_greedy
from tests.worker.support import local_start

PROMPT = [256, *b"A slab that was damaged on its way is never decoded on."]


async def test_a_corrupt_slab_fails_both_legs_and_nothing_else(
    model_t: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(model_t) as workers:
        with monkeypatch.context() as broken:
            honest = frames.checksum
            broken.setattr(frames, "checksum", lambda payload: honest(payload) ^ 1)
            story = await workers.router.relay(local_start("hit", PROMPT))
        reasons = [event.reason for event in story.events if isinstance(event, Failed)]
        assert reasons == [FailReason.TRANSFER, FailReason.TRANSFER]
        assert not [event for event in story.events if isinstance(event, Committed)]
        await workers.assert_empty()
        replay = await workers.router.relay(local_start("hit", PROMPT, attempt=1))
        assert replay.output() == plain_greedy(model_t, local_start("plain", PROMPT))
        await workers.assert_empty()


async def test_the_death_of_an_engine_fails_its_streams_and_its_health(
    model_t: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(model_t) as workers:
        monkeypatch.setattr(workers.decode.engine, "_runner", Raising())
        story = await workers.router.local(local_start("doomed"))
        (failed,) = story.events
        assert isinstance(failed, Failed)
        assert failed.reason is FailReason.ENGINE
        await workers.decode.wait()
        assert "a step that nobody foresaw" in workers.decode.health()
        assert workers.prefill.health() == ""


async def test_a_step_that_never_ends_is_a_dead_engine(model_t: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    impatient = replace(CONFIG, engine=replace(CONFIG.engine, max_step_ms=300))
    async with pair(model_t, impatient) as workers:
        stuck = Stuck()
        monkeypatch.setattr(workers.decode.engine, "_runner", stuck)
        try:
            story = await workers.router.local(local_start("stuck"))
            (failed,) = story.events
            assert isinstance(failed, Failed)
            assert failed.reason is FailReason.ENGINE
            assert "more than max_step_ms = 300" in workers.decode.health()
        finally:
            stuck.go_on.set()


class Raising:
    def run(self, plan: object) -> None:
        raise ValueError("a step that nobody foresaw")


class Stuck:
    """Steps end, with an error, when told to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def run(self, plan: object) -> None:
        self.go_on.wait(60.0)
        raise ValueError("this step came to nothing")


async def test_a_taken_port_is_an_error_that_names_the_flag(model_t: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = WorkerProcess(replace(CONFIG, worker=replace(CONFIG.worker, port=port)), model_t)
        with pytest.raises(ConfigError, match="--port"):
            await process.start()
        assert not [thread for thread in threading.enumerate() if thread.name in ("engine", "kv-transfer")]


async def test_a_role_that_does_not_exist_is_refused_before_anything_is_loaded(model_t: Path) -> None:
    process = WorkerProcess(replace(CONFIG, worker=replace(CONFIG.worker, role="chef")), model_t)
    with pytest.raises(ConfigError, match="prefill, decode, mixed"):
        await process.start()


async def test_a_worker_without_its_registry_works(model_t: Path) -> None:
    nobody = PlacementSettings(redis_url="redis://127.0.0.1:1/0", call_timeout_s=0.2, renew_s=0.1)
    async with pair(model_t, replace(CONFIG, placement=nobody)) as workers:
        story = await workers.router.relay(local_start("r", PROMPT))
        assert story.output() == plain_greedy(model_t, local_start("plain", PROMPT))
        assert workers.decode.health() == ""


def test_a_wildcard_address_is_not_what_others_dial() -> None:
    assert advertised_host("10.1.2.3") == "10.1.2.3"
    assert advertised_host("0.0.0.0") not in ("", "0.0.0.0")


def test_threads_are_shared_among_local_workers() -> None:
    crowded = replace(Config().cluster, prefill=500, decode=500)
    assert fair_share_of_cores(replace(Config(), cluster=crowded)) == 1


def test_a_worker_needs_no_ray_and_its_help_no_torch() -> None:
    script = (
        "import sys, kvrelay.cli.main\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules), 'the command line is heavy'\n"
        "import kvrelay.worker.process\n"
        "assert 'torch' in sys.modules\n"
        "assert 'ray' not in sys.modules, 'a worker has loaded Ray'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
