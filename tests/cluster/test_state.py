"""The state file: who owns a cluster, what it started, and how `down` cleans up after an owner that died."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from kvrelay.cluster.local import end_processes
from kvrelay.cluster.members import members
from kvrelay.cluster.owner import StopRequest, stop_cluster
from kvrelay.cluster.state import (
    ClusterState,
    Member,
    ProcessId,
    find_live_state,
    find_state,
    read_states,
    remove_state,
    state_directory,
    write_state,
)
from kvrelay.core.errors import ConfigError

NOBODY = ProcessId(pid=2**22 + 1, started=0.0)


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def bystander() -> Iterator[psutil.Process]:
    """A process that would run for a minute."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield psutil.Process(child.pid)
    child.kill()
    child.wait()


def state(port: int = 8000, owner: ProcessId = NOBODY) -> ClusterState:
    return ClusterState(
        owner=owner, http=f"http://127.0.0.1:{port}", grpc="127.0.0.1:9000", metrics="", redis="redis://127.0.0.1:1/0",
        namespace="default", model="m", root="/nonexistent", http_port=port,
    )  # fmt: skip


def test_what_is_written_is_read_back() -> None:
    member = Member("decode", "decode-1", 7, "127.0.0.1:1", 64, 16, 256)
    written = replace(state(), routers=(NOBODY,), workers=(member,), pids=(NOBODY, ProcessId(7, 1.5)))
    path = write_state(written)
    assert path.stat().st_mode & 0o077 == 0
    assert read_states() == [written]
    remove_state(8000)
    assert read_states() == []


def test_no_cluster_says_how_to_start_one() -> None:
    with pytest.raises(ConfigError, match="kvrelay up"):
        find_state()


def test_several_clusters_ask_for_the_port() -> None:
    write_state(state(8000))
    write_state(state(8100))
    with pytest.raises(ConfigError, match=r"--http-port \(8000, 8100\)"):
        find_state()
    assert find_state(8100).http_port == 8100


def test_a_dead_owner_is_told_from_a_live_one() -> None:
    write_state(state(owner=ProcessId.of(psutil.Process())))
    assert find_live_state().http_port == 8000
    write_state(state())
    with pytest.raises(ConfigError, match="kvrelay down"):
        find_live_state()


def test_a_recycled_pid_is_another_process(bystander: psutil.Process) -> None:
    recorded = ProcessId(bystander.pid, bystander.create_time() - 100)
    assert recorded.find() is None
    assert end_processes([recorded], 0.0) == []
    assert bystander.is_running()


def test_down_ends_what_a_dead_owner_left(bystander: psutil.Process) -> None:
    left = replace(state(), pids=(ProcessId.of(bystander), NOBODY))
    write_state(left)
    killed = stop_cluster(left, end_timeout_s=0.0)
    assert [item.split()[0] for item in killed] == [str(bystander.pid)]
    assert bystander.wait(10) is not None
    assert read_states() == []


def test_workers_are_known_without_redis_and_the_dead_are_left_out(bystander: psutil.Process) -> None:
    alive = Member("decode", "decode-1", bystander.pid, "127.0.0.1:1", 64, 16, 256)
    dead = Member("prefill", "prefill-1", NOBODY.pid, "127.0.0.1:2", 64, 16, 256)
    assert members(replace(state(), workers=(dead, alive))) == [alive]


def test_a_foreign_directory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state_directory()
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="another user"):
        state_directory()


def test_a_signal_interrupts_the_start_and_is_a_request_later() -> None:
    with StopRequest() as stop:
        with pytest.raises(KeyboardInterrupt):
            psutil.Process().terminate()
        assert stop.wait(0)
    with StopRequest() as stop:
        stop.listen()
        assert not stop.wait(0)
        psutil.Process().terminate()
        assert stop.wait(5)
