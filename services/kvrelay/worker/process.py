"""A prefill or decode process, put together. No Ray: a Serve replica and `kvrelay worker` run the same object.

    start   load the model ─▶ engine + transfer hub ─▶ Attach server ─▶ registered, watched
    drain   no new work; the running sequences move to other workers, or end
    stop    supervisor · presence · streams · Attach server · engine · hub · registry, in this order
    failed  (supervisor) every stream told at once, `health` says why, `wait` returns; the caller ends the process

Three threads: this loop (Attach, presence, supervision), the engine's, the hub's. Whatever `start` has acquired is
given back by `stop`, also when `start` itself gave up half-way.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import grpc

from kvrelay.core.clock import SystemClock
from kvrelay.core.config import Config, load_faults
from kvrelay.core.errors import ConfigError
from kvrelay.core.events import Event
from kvrelay.core.handles import HandleSeal
from kvrelay.core.ids import Incarnation, WorkerId
from kvrelay.core.placement import Load, Role, WorkerRecord
from kvrelay.core.progress import NullProgress, Progress
from kvrelay.engine.engine import Engine
from kvrelay.engine.spec import EngineSpec
from kvrelay.model.load import LoadedModel, load
from kvrelay.observe.metrics import WorkerMetrics, serve_metrics
from kvrelay.pb import worker_pb2_grpc
from kvrelay.placement.open import open_registry
from kvrelay.rpc.server import bind, new_server
from kvrelay.rpc.tls import Tls, open_tls
from kvrelay.transfer.hub import TransferHub
from kvrelay.worker.attach import AttachService
from kvrelay.worker.drain import drain
from kvrelay.worker.metered import MeteredRunner
from kvrelay.worker.outbox import StepOutbox
from kvrelay.worker.presence import Presence
from kvrelay.worker.supervisor import Supervisor, watch_engine

STOP_GRACE_S = 5.0
"""For each part that has to end: last words to routers, the engine's current step, the open Pushes."""


class WorkerProcess:
    """One worker of one process. `start` once; every other method belongs to the same event loop."""

    def __init__(self, config: Config, directory: Path, *, progress: Progress | None = None) -> None:
        """`directory` holds the model. Nothing is acquired before `start`. Raises ConfigError for bad fault rules."""
        self._config = config
        self._directory = directory
        self._progress = progress or NullProgress()
        self._seal = HandleSeal(SystemClock())
        self._faults = load_faults(config)
        self._owned = AsyncExitStack()
        self._supervisor = Supervisor(self._on_failure)
        self.metrics = WorkerMetrics()
        self.record: WorkerRecord
        self._model: LoadedModel
        self._hub: TransferHub
        self._engine: Engine
        self._attach: AttachService
        self._presence: Presence

    @property
    def model(self) -> LoadedModel:
        return self._model

    @property
    def engine(self) -> Engine:
        """To look at. Its sequences and blocks belong to its own thread."""
        return self._engine

    async def start(self) -> WorkerRecord:
        """Returns once routers can attach. Raises ConfigError for a model or a setting that cannot work."""
        async with AsyncExitStack() as owned:
            await self._acquire(owned)
            self._owned = owned.pop_all()
        self._supervisor.run("engine", self._watch_engine)
        self._supervisor.run("presence", self._presence.keep, restart_s=self._config.placement.renew_s)
        self._owned.push_async_callback(self._supervisor.stop)
        return self.record

    def health(self) -> str:
        """Empty while this worker does its job, else why not."""
        return self._supervisor.reason

    def load(self) -> Load:
        return self._attach.load()

    async def drain(self, grace_s: float | None = None) -> bool:
        """Take no new work, let the running end. False: some were left after the grace (default: `drain_s`)."""
        grace_s = self._config.worker.drain_s if grace_s is None else grace_s
        return await drain(self._engine, self._attach, self._presence, grace_s)

    async def stop(self) -> None:
        """Give everything back. Streams that are still open end: their routers replay."""
        await self._owned.aclose()

    async def close_streams(self, grace_s: float) -> None:
        """The last words of a worker that is about to be ended with its process, and nothing else."""
        await self._attach.close(grace_s)
        await self._presence.leave()

    async def wait(self) -> None:
        """Until this worker has failed (`health` says why) or was stopped."""
        await self._supervisor.wait()

    async def _acquire(self, owned: AsyncExitStack) -> None:
        """In the order of need; `owned` gives back in reverse."""
        settings = self._config.worker
        role = _role(settings.role)
        tls = open_tls(self._config.security)
        worker_id = WorkerId(settings.worker_id or f"{role.value}-{secrets.token_hex(3)}")
        incarnation = Incarnation(secrets.token_hex(8))
        if settings.metrics_port:
            scrape = serve_metrics(settings.host, settings.metrics_port, self.metrics.registry)
            owned.push_async_callback(asyncio.to_thread, scrape.close)
        self._model = model = await asyncio.to_thread(self._load_model)
        registry = open_registry(self._config.placement, SystemClock(), self.metrics, self._faults)
        owned.push_async_callback(registry.close)
        self._hub = TransferHub(
            self._config.transfer, model.identity, model.storage, worker_id, incarnation, self.metrics, tls,
            self._seal, self._faults,
        )
        spec = self._build_engine()
        host = await asyncio.to_thread(advertised_host, settings.host)
        push_port = await self._start_hub(owned, settings.host)
        server, port = self._listen(settings.host, settings.port, tls)
        self.record = WorkerRecord(
            worker_id=worker_id, incarnation=incarnation, role=role, address=f"{host}:{port}",
            push_address=f"{host}:{push_port}", model=model.served_name, identity=model.identity,
            shard=model.storage.shard, num_blocks=model.num_blocks, max_context=spec.max_sequence, pid=os.getpid(),
            numerics=model.numerics,
        )
        self._attach.open(self.record, self._engine.load())
        self._engine.start()
        owned.push_async_callback(asyncio.to_thread, self._engine.stop, STOP_GRACE_S)
        await server.start()
        owned.push_async_callback(server.stop, None)
        owned.push_async_callback(self._attach.close, STOP_GRACE_S)
        self._presence = Presence(registry, self.record, self.load, self._config.placement)
        owned.push_async_callback(self._presence.leave)

    async def _start_hub(self, owned: AsyncExitStack, host: str) -> int:
        """Its own thread and loop. Returns the port on which Pushes arrive."""
        owned.push_async_callback(asyncio.to_thread, self._hub.stop, STOP_GRACE_S)
        try:
            address = await asyncio.to_thread(self._hub.start, host, 0)
        except OSError as error:
            raise ConfigError(f"{error}; choose an address of this machine with --host") from error
        return int(address.rpartition(":")[2])

    def _listen(self, host: str, port: int, tls: Tls | None) -> tuple[grpc.aio.Server, int]:
        """Takes the port. Nothing is answered before the server is started: the record must be known first."""
        server = new_server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self._attach, server)  # type: ignore[no-untyped-call]
        try:
            return server, bind(server, host, port, tls)
        except OSError as error:
            raise ConfigError(f"{error}; choose another port with --port") from error

    def _load_model(self) -> LoadedModel:
        threads = self._config.worker.threads or fair_share_of_cores(self._config)
        return load(self._directory, self._config.model, self._config.engine, threads=threads, progress=self._progress)

    def _build_engine(self) -> EngineSpec:
        """The one place where deciding, computing and sending meet."""
        model, config = self._model, self._config
        spec = EngineSpec(
            num_blocks=model.num_blocks, block_size=model.layout.block_size, max_context=model.max_context,
            eos_token_ids=model.eos_token_ids, identity_fingerprint=model.identity.fingerprint(),
            kv_dtype=model.layout.dtype, vocab_size=model.num_tokens,
        )
        outbox = StepOutbox(
            asyncio.get_running_loop(), config.link.max_outbox_bytes,
            on_step=self._on_step, on_overflow=self._on_overflow, on_death=self._on_death,
        )
        runner = MeteredRunner(model.runner, self.metrics, SystemClock())
        self._engine = Engine(
            config.engine, spec, runner, self._hub, outbox, SystemClock(), max_reservations=config.transfer.max_open
        )
        self._hub.bind(self._engine)
        self._attach = AttachService(
            self._engine, config.link, engine_age_ms=self._engine.age_ms, metrics=self.metrics, seal=self._seal,
            max_reservations=config.transfer.max_open_per_router, faults=self._faults,
        )
        return spec

    def _on_step(self, events: Sequence[Event], load: Load) -> None:
        self._attach.deliver(events, load)

    def _on_overflow(self) -> None:
        self._attach.end_all("this worker could not keep up with its own events")

    def _on_death(self, error: BaseException) -> None:
        self._supervisor.fail(f"the engine died: {error or type(error).__name__}")

    def _on_failure(self, reason: str) -> None:
        self._attach.fail_all(reason)

    async def _watch_engine(self) -> None:
        await watch_engine(
            self._engine, max_step_ms=self._config.engine.max_step_ms, every_s=self._config.link.beat_s
        )


def _role(name: str) -> Role:
    try:
        return Role(name)
    except ValueError:
        known = ", ".join(role.value for role in Role)
        raise ConfigError(f"worker.role is {name!r}; it must be one of {known}") from None


def fair_share_of_cores(config: Config) -> int:
    """The cores this process may use, divided by the workers that the config puts on this machine."""
    num_workers = max(1, config.cluster.prefill + config.cluster.decode)
    return max(1, len(os.sched_getaffinity(0)) // num_workers)


def advertised_host(host: str) -> str:
    """What others should dial: a wildcard address becomes this machine's own."""
    if host not in ("", "0.0.0.0", "::"):
        return host
    return socket.gethostbyname(socket.gethostname())
