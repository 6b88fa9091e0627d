"""A whole cluster on this machine, owned by this process: Redis, Ray, Serve with HAProxy, a router, two pools.

    __init__ ─▶ start: ports ─▶ Redis ─▶ Ray ─▶ Serve ─▶ application ─▶ ready (router's /readyz through the front port)
                                                                          │ refresh: who runs, into the state file
                stop:  Serve (drains replicas) ─▶ Ray ─▶ Redis ─▶ every recorded process is gone, or is killed ◀┘

Ray's settings are read when it is imported, so a process can start one local cluster in its life.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import psutil

from kvrelay.cluster import env
from kvrelay.cluster.members import member_of
from kvrelay.cluster.ports import choose_ports
from kvrelay.cluster.state import LOG_DIRECTORY, ClusterState, ProcessId, remove_state, write_state
from kvrelay.core.config import Config
from kvrelay.core.errors import ConfigError
from kvrelay.core.progress import NullProgress, Progress
from kvrelay.placement.embedded import EmbeddedRedis

if TYPE_CHECKING:
    from kvrelay.cluster.serve_app import ServeApp

_READY_TIMEOUT_S = 300.0
_ANNOUNCED_TIMEOUT_S = 10.0
_POLL_S = 0.1
_END_TIMEOUT_S = 10.0
_OBJECT_STORE_BYTES = 80 << 20
"""The least Ray accepts: no token and no KV byte goes through it."""
_DRAIN_S = 3.0
"""Ctrl-C on a laptop does not wait half a minute for streams that nobody reads any more."""


@dataclass(frozen=True, slots=True)
class LocalOptions:
    config: Config
    """`placement.redis_url` empty: an embedded server is started. Ports come from `config.router`."""
    directory: Path
    """The prepared model."""


class LocalCluster:
    def __init__(self, options: LocalOptions, progress: Progress | None = None) -> None:
        self._options = options
        self._progress = progress or NullProgress()
        self._root: Path | None = None
        self._redis: EmbeddedRedis | None = None
        self._serve: ServeApp | None = None
        self._seen: dict[int, ProcessId] = {}
        self._state: ClusterState | None = None
        self._has_haproxy = False

    @property
    def state(self) -> ClusterState:
        if self._state is None:
            raise ConfigError("the cluster is not running")
        return self._state

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when the cluster answers. Raises ConfigError; whatever had been started is stopped then."""
        with contextlib.ExitStack() as undo:
            undo.push(self._give_up)
            self._start()
            undo.pop_all()

    def _give_up(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        """The logs stay for an error that names them; neither a Ctrl-C nor a wrong setting needs them."""
        if self._root is None:
            return
        is_explained = isinstance(error, ConfigError) and str(self._root) not in str(error)
        with self._step("Stopping what had been started"):
            self.stop(keep_logs=isinstance(error, Exception) and not is_explained)

    def _start(self) -> None:
        config = self._local_config()
        ports = choose_ports(
            config.router.http_port,
            config.router.grpc_port,
            config.router.metrics_port,
            config.cluster.routers + config.cluster.prefill + config.cluster.decode,
        )
        if "ray.serve" in sys.modules:
            raise ConfigError("Ray Serve is already in use in this process: it can start one local cluster only")
        self._root = Path(tempfile.mkdtemp(prefix="kvr-", dir=_short_directory()))
        logs = self._root / LOG_DIRECTORY
        logs.mkdir()
        config = self._with_redis(config)
        haproxy = env.find_haproxy()
        self._has_haproxy = haproxy is not None
        env.apply(env.ray_environment(self._root, ports, haproxy))
        with self._step("Starting Ray"):
            from kvrelay.cluster.serve_app import ServeApp, deploy  # imports Ray, which reads its settings now

            self._serve = ServeApp.start(self._root / "ray", ports, _OBJECT_STORE_BYTES)
        self._remember()
        deploy(self._serve, config, self._options.directory, logs)
        self._wait_until_ready(config)
        self._publish(config)

    def _local_config(self) -> Config:
        config = self._options.config
        workers = config.cluster.prefill + config.cluster.decode
        threads = config.worker.threads or max(1, (os.cpu_count() or 1) // max(1, workers))
        worker = replace(config.worker, threads=threads, drain_s=min(config.worker.drain_s, _DRAIN_S))
        return replace(config, worker=worker)

    def _with_redis(self, config: Config) -> Config:
        if config.placement.redis_url:
            return config
        with self._step("Starting the embedded Redis server"):
            self._redis = EmbeddedRedis(parent=self._root)
            url = self._redis.start()
        self._remember()
        return replace(config, placement=replace(config.placement, redis_url=url))

    def _wait_until_ready(self, config: Config) -> None:
        """Workers count up as they come; the last word is the router's."""
        assert self._serve is not None
        wanted = config.cluster.prefill + config.cluster.decode
        deadline = time.monotonic() + _READY_TIMEOUT_S
        with self._step("Loading the model", wanted) as advance:
            num_running = 0
            while num_running < wanted:
                now_running = self._serve.num_workers_running()
                advance(now_running - num_running)
                num_running = now_running
                self._pause(deadline, "its workers did not start")
        with self._step("Warming up"):
            while reason := self._serve.not_ready():
                self._pause(deadline, reason)
            announced = min(deadline, time.monotonic() + _ANNOUNCED_TIMEOUT_S)
            while len(self._serve.workers()) < wanted and time.monotonic() < announced:
                time.sleep(_POLL_S)

    def _pause(self, deadline: float, reason: str) -> None:
        if time.monotonic() > deadline:
            raise ConfigError(f"the cluster is not ready after {_READY_TIMEOUT_S:.0f} s: {reason}; logs: {self._root}")
        time.sleep(_POLL_S)

    def _publish(self, config: Config) -> None:
        assert self._serve is not None
        router = config.router
        self._state = ClusterState(
            owner=ProcessId.of(psutil.Process()),
            http=f"http://127.0.0.1:{router.http_port}",
            grpc=f"127.0.0.1:{router.grpc_port}",
            metrics=f"http://127.0.0.1:{router.metrics_port}/metrics" if router.metrics_port else "",
            redis=config.placement.redis_url,
            namespace=config.placement.namespace,
            model=config.model.served_name or self._options.directory.name,
            root=str(self._root),
            http_port=router.http_port,
            has_haproxy=self._has_haproxy,
        )
        self.refresh()

    def refresh(self) -> None:
        """Note the processes that run now: replicas come and go. Called every few seconds by the owner."""
        assert self._serve is not None
        self._revive_redis()
        self._remember()
        routers = tuple(
            seen for pid in self._serve.router_pids() if (seen := self._seen.get(pid)) is not None
        )
        members = tuple(member_of(record) for record in self._serve.workers())
        self._state = replace(self.state, routers=routers, workers=members, pids=tuple(self._seen.values()))
        write_state(self._state)

    def _revive_redis(self) -> None:
        """Ours to restart, at the same port: routers and workers find it again by themselves."""
        if self._redis is None or self._redis.is_running:
            return
        port = self._redis.port
        self._redis.stop()
        with contextlib.suppress(ConfigError):  # the port is taken for the moment: next time
            self._redis.start(port)

    def _remember(self) -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._seen[process.pid] = ProcessId.of(process)

    def stop(self, *, keep_logs: bool = False) -> list[str]:
        """Stop everything in order. Returns what had to be killed: empty unless something hung."""
        self._remember()
        if self._serve is not None:
            with contextlib.redirect_stdout(io.StringIO()):  # Ray reports the controller's planned end as a failure
                self._serve.stop()
            self._serve = None
        if self._redis is not None:
            self._redis.stop()
            self._redis = None
        killed = end_processes(list(self._seen.values()), _END_TIMEOUT_S)
        self._seen.clear()
        if self._state is not None:
            remove_state(self._state.http_port)
            self._state = None
        if self._root is not None and not keep_logs:
            shutil.rmtree(self._root, ignore_errors=True)
        self._root = None
        return killed

    @contextlib.contextmanager
    def _step(self, name: str, total: int = 0) -> Iterator[Callable[[int], None]]:
        """A step that fails is never done."""
        self._progress.start(name, total)
        yield self._progress.advance
        self._progress.done()


def end_processes(recorded: list[ProcessId], timeout_s: float) -> list[str]:
    """Wait until all are gone, then kill those that are not: these very processes, never by name."""
    alive = [process for item in recorded if (process := item.find()) is not None]
    _, alive = psutil.wait_procs(alive, timeout=timeout_s)
    killed = []
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            killed.append(f"{process.pid} {process.name()}")
            process.kill()
    psutil.wait_procs(alive, timeout=timeout_s)
    return killed


def _short_directory() -> str:
    """Ray's socket paths must stay under 104 characters, and some temporary directories are long."""
    return "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()
