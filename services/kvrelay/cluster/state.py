"""What a running local cluster leaves on disk for `kvrelay ps`, `drain` and `down`: one JSON file per HTTP port.

    $XDG_RUNTIME_DIR/kvrelay/cluster-8000.json        or /tmp/kvrelay-<uid>/cluster-8000.json

Written by the process that owns the cluster, removed by it; a file whose owner is gone is stale, and the processes
it names are what `down` may still have to stop.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from kvrelay.core.errors import ConfigError

LOG_DIRECTORY = "logs"


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A pid alone may name another process by now; with its start time it names one process for ever."""

    pid: int
    started: float

    @classmethod
    def of(cls, process: psutil.Process) -> ProcessId:
        return cls(process.pid, process.create_time())

    def find(self) -> psutil.Process | None:
        """The process, if it still runs."""
        try:
            process = psutil.Process(self.pid)
            alive = process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - self.started) < 1
        except psutil.NoSuchProcess:
            return None
        return process if alive else None


@dataclass(frozen=True, slots=True)
class Member:
    """One worker of the cluster, as it presents itself."""

    role: str
    id: str
    pid: int
    grpc: str
    num_blocks: int
    block_size: int
    max_context: int


@dataclass(frozen=True, slots=True)
class ClusterState:
    owner: ProcessId
    http: str
    grpc: str
    metrics: str
    redis: str
    namespace: str
    model: str
    root: str
    """Directory of everything that cluster writes."""
    http_port: int
    has_haproxy: bool = True
    """False: Serve's own proxy stands in front."""
    routers: tuple[ProcessId, ...] = ()
    workers: tuple[Member, ...] = ()
    pids: tuple[ProcessId, ...] = ()
    """Every process the owner has started and that has been seen alive."""

    @property
    def logs(self) -> Path:
        """One file per process: its events, and the router's line per request."""
        return Path(self.root) / LOG_DIRECTORY


def state_directory() -> Path:
    """Private to this user; created if needed. Raises ConfigError if it belongs to somebody else."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    base = Path(runtime) / "kvrelay" if runtime and os.access(runtime, os.W_OK) else _temporary()
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    if base.stat().st_uid != os.getuid():
        raise ConfigError(f"{base} belongs to another user")
    return base


def _temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"kvrelay-{os.getuid()}"


def write_state(state: ClusterState) -> Path:
    path = state_directory() / f"cluster-{state.http_port}.json"
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(asdict(state)))
    draft.chmod(0o600)
    draft.replace(path)
    return path


def remove_state(http_port: int) -> None:
    (state_directory() / f"cluster-{http_port}.json").unlink(missing_ok=True)


def read_states() -> list[ClusterState]:
    """All clusters of this user on this machine, stale ones too, by HTTP port."""
    return sorted(
        (_parse(path.read_text()) for path in state_directory().glob("cluster-*.json")), key=lambda s: s.http_port
    )


def find_state(http_port: int | None = None) -> ClusterState:
    """The cluster at this HTTP port, or the only one. Raises ConfigError that says what to do."""
    states = read_states()
    if http_port is not None:
        states = [state for state in states if state.http_port == http_port]
    if not states:
        where = f" at port {http_port}" if http_port is not None else ""
        raise ConfigError(f"no local cluster{where} is running; start one with: kvrelay up")
    if len(states) > 1:
        ports = ", ".join(str(state.http_port) for state in states)
        raise ConfigError(f"several local clusters are running; choose one with --http-port ({ports})")
    return states[0]


def find_live_state(http_port: int | None = None) -> ClusterState:
    """Like `find_state`, for commands that need the cluster to run."""
    state = find_state(http_port)
    if state.owner.find() is None:
        raise ConfigError(f"the cluster at {state.http} has died; clean up with: kvrelay down")
    return state


def _parse(text: str) -> ClusterState:
    data = json.loads(text)
    data["owner"] = ProcessId(**data["owner"])
    data["workers"] = tuple(Member(**item) for item in data["workers"])
    for name in ("routers", "pids"):
        data[name] = tuple(ProcessId(**item) for item in data[name])
    return ClusterState(**data)
