"""Who keeps a local cluster alive: the command in the foreground, or for `--detach` a process of its own.

    spawn_owner ─▶ python -m kvrelay.cluster.owner ORDER ─▶ LocalCluster ─▶ state file ─▶ SIGTERM ─▶ stop
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import psutil

from kvrelay.cluster.local import LocalCluster, LocalOptions, end_processes
from kvrelay.cluster.state import ClusterState, ProcessId, read_states, remove_state, state_directory
from kvrelay.core.config import Config, config_from_dict, config_to_dict
from kvrelay.core.errors import ConfigError
from kvrelay.core.progress import Progress

REFRESH_S = 5.0
_SAYS = "kvrelay: "
"""Begins the owner's last words, after whatever Ray has written."""
_START_TIMEOUT_S = 360.0
_STOP_TIMEOUT_S = 90.0
_END_TIMEOUT_S = 5.0
_POLL_S = 0.1


class StopRequest:
    """SIGINT and SIGTERM: an interrupt while the cluster starts, a polite request once it runs, nothing after that."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._interruptible = True

    def __enter__(self) -> StopRequest:
        self._install()
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def listen(self) -> None:
        """From now on a signal only sets the event. Ray has put its own handler in place meanwhile."""
        self._interruptible = False
        self._install()

    def wait(self, timeout_s: float) -> bool:
        """True once asked to stop."""
        return self._event.wait(timeout_s)

    def _install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._event.set()
        if self._interruptible:
            self._interruptible = False
            raise KeyboardInterrupt


def spawn_owner(config: Config, directory: Path, progress: Progress) -> ClusterState:
    """Start a process that owns a cluster and outlives this one; returns when it serves. Raises ConfigError."""
    home = state_directory()
    order = home / f"order-{config.router.http_port}.json"
    log = _owner_log(config.router.http_port)
    order.touch(mode=0o600)
    order.write_text(json.dumps({"config": config_to_dict(config), "directory": str(directory)}))
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "kvrelay.cluster.owner", str(order)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    progress.start("Starting the cluster in the background", 0)
    with contextlib.ExitStack() as undo:
        undo.callback(order.unlink, missing_ok=True)
        with contextlib.ExitStack() as failed:
            failed.callback(child.terminate)
            state = _wait_for_owner(child, log)
            failed.pop_all()
    progress.done()
    return state


def _wait_for_owner(child: subprocess.Popen[bytes], log: Path) -> ClusterState:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        for state in read_states():
            if state.owner.pid == child.pid:
                return state
        if child.poll() is not None:
            said = log.read_text(errors="replace").strip()
            raise ConfigError(said.rpartition(_SAYS)[2] or f"the cluster's process said nothing; see {log}")
        time.sleep(_POLL_S)
    raise ConfigError(f"the cluster is not ready after {_START_TIMEOUT_S:.0f} s; see {log}")


def stop_cluster(state: ClusterState, *, end_timeout_s: float = _END_TIMEOUT_S) -> list[str]:
    """Ask the owner to stop, wait, and end what is left. Returns what had to be killed."""
    owner = state.owner.find()
    killed = []
    if owner is not None:
        owner.terminate()
        try:
            owner.wait(_STOP_TIMEOUT_S)
        except psutil.TimeoutExpired:
            killed += end_processes([ProcessId.of(owner)], 0)
    killed += end_processes(list(state.pids), end_timeout_s)
    remove_state(state.http_port)
    _owner_log(state.http_port).unlink(missing_ok=True)
    shutil.rmtree(state.root, ignore_errors=True)
    return killed


def _owner_log(http_port: int) -> Path:
    return state_directory() / f"cluster-{http_port}.log"


def main(order: Path) -> None:
    data = json.loads(order.read_text())
    options = LocalOptions(config_from_dict(data["config"]), Path(data["directory"]))
    with StopRequest() as stop, LocalCluster(options) as cluster:
        stop.listen()
        while not stop.wait(REFRESH_S):
            cluster.refresh()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except ConfigError as error:
        print(f"{_SAYS}{error}", file=sys.stderr)
        sys.exit(2)
