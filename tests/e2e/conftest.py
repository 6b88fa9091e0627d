"""The one Ray cluster of the test run: Model T in float32, one prefill and two decode workers, free ports throughout.

It runs as a user's would: a process of its own owns it (`kvrelay up --detach`), its state file lies in a directory
of the test run, and Redis is a server that tests may stop and flush. Nothing may be left when it is stopped.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import pytest

from kvrelay.cluster.members import workers
from kvrelay.cluster.owner import spawn_owner, stop_cluster
from kvrelay.cluster.ports import RAY_WORKER_PORTS
from kvrelay.cluster.state import ClusterState, find_state
from kvrelay.core.config import (
    ClusterSettings,
    Config,
    EngineSettings,
    ModelSettings,
    PlacementSettings,
    RouterSettings,
)
from kvrelay.core.placement import WorkerRecord
from kvrelay.core.progress import NullProgress
from kvrelay.placement.embedded import EmbeddedRedis
from tests.support.tiny import write_model_t

NUM_DECODE = 2
PATIENCE_S = 60.0


@dataclass
class Cluster:
    state: ClusterState
    config: Config
    directory: Path
    redis: EmbeddedRedis

    @property
    def model(self) -> str:
        return self.state.model

    @property
    def base_url(self) -> str:
        return f"{self.state.http}/v1"

    def kvrelay(self, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command as a user would."""
        command = [sys.executable, "-m", "kvrelay.cli.main", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)

    def ps(self) -> dict[str, Any]:
        shown = self.kvrelay("ps", "--json")
        assert shown.returncode == 0, shown.stderr
        report: dict[str, Any] = json.loads(shown.stdout)
        return report

    def workers(self) -> list[WorkerRecord]:
        return list(workers(self.state))

    def wait_until_whole(self) -> None:
        """All workers registered, each of them alive: a killed one has been replaced."""

        def is_whole() -> bool:
            alive = [record for record in self.workers() if psutil.pid_exists(record.pid)]
            return len(alive) == 1 + NUM_DECODE

        wait_for(is_whole, "all workers are back")


def wait_for(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Poll a real process from outside: there is nothing to wait on."""
    deadline = monotonic() + patience_s
    while not condition():
        assert monotonic() < deadline, f"waited {patience_s:.0f} s in vain until {what}"
        sleep(0.05)


def free_ports(count: int) -> list[int]:
    """Free now, distinct, and none that Ray refuses."""
    sockets: list[socket.socket] = []
    found: list[int] = []
    try:
        while len(found) < count:
            probe = socket.socket()
            probe.bind(("127.0.0.1", 0))
            sockets.append(probe)
            if probe.getsockname()[1] not in RAY_WORKER_PORTS:
                found.append(probe.getsockname()[1])
    finally:
        for probe in sockets:
            probe.close()
    return found


@pytest.fixture(scope="session")
def model_t(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_t(tmp_path_factory.mktemp("models") / "model-t")


@pytest.fixture(scope="session")
def cluster(model_t: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    redis = EmbeddedRedis()
    redis.start()
    http_port, grpc_port = free_ports(2)
    config = Config(
        model=ModelSettings(path=str(model_t), dtype="float32"),
        engine=EngineSettings(num_blocks=1024),
        router=RouterSettings(http_port=http_port, grpc_port=grpc_port),
        placement=PlacementSettings(redis_url=redis.url, lease_s=3.0, renew_s=0.5, always_relay=True),
        cluster=ClusterSettings(prefill=1, decode=NUM_DECODE),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        patch.delenv("KVRELAY_REDIS_URL", raising=False)
        state = spawn_owner(config, model_t, NullProgress())
        try:
            yield Cluster(state, config, model_t, redis)
        finally:
            started = find_state().pids
            killed = stop_cluster(state)
            redis.stop()
        assert killed == [], "these had to be killed"
        assert [item for item in started if item.find() is not None] == []
