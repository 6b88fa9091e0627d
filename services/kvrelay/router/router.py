"""The router: the front door's counter in front, the fleet of workers behind, one coordinator task per request.

    start ─▶ links dial, warm-up ─▶ READY ─drain─▶ nobody new, the rest finish ─stop─▶ everything cancelled, closed

The router owns its fleet, its requests and its notes to the registry. The registry itself belongs to the caller.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from kvrelay.core.config import Config, RouterSettings
from kvrelay.core.faults import Faults
from kvrelay.core.ids import TokenId
from kvrelay.core.output import GenerateRequest, Output
from kvrelay.core.placement import Hints
from kvrelay.observe.metrics import MetricsServer, RouterMetrics, serve_metrics
from kvrelay.placement.policy import place
from kvrelay.placement.registry import Registry
from kvrelay.router.admission import Admission, WaitingRoom
from kvrelay.router.bell import Bell
from kvrelay.router.coordinator import Coordinator, Kitchen
from kvrelay.router.delivery import Delivery
from kvrelay.router.fleet import Fleet
from kvrelay.router.front import ModelCard, Readiness
from kvrelay.router.session import SessionBook
from kvrelay.router.warmup import SMALLEST, WarmUp
from kvrelay.rpc.attach import dial_with
from kvrelay.rpc.faults import faulty_dial
from kvrelay.rpc.tls import open_tls
from kvrelay.text.output import OutputText
from kvrelay.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Served:
    """Implements OpenRequest: a coordinator's task and what it delivers."""

    def __init__(self, delivery: Delivery, task: asyncio.Task[None], leave: Callable[[], None]) -> None:
        self.delivery = delivery
        self.take = delivery.take
        self._task = task
        self._leave = leave

    async def close(self) -> None:
        """Once."""
        try:
            self._task.cancel()
            await asyncio.wait([self._task])
        finally:
            self._leave()


class Router:
    """Implements FrontDoor. Belongs to the event loop it was started on."""

    def __init__(
        self, config: Config, tokenizer: Tokenizer, registry: Registry, *, static_workers: Sequence[str] = (),
        metrics: RouterMetrics | None = None, unix_time: Callable[[], float] = time.time,
        stopwatch: Callable[[], float] = time.perf_counter, faults: Faults | None = None,
    ) -> None:
        """`stopwatch` is not the loop's time: uvloop's counts whole milliseconds and stands still within a turn.

        Raises ConfigError for certificates that cannot work.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._static_workers = tuple(static_workers)
        self._created = int(unix_time())
        self.metrics = metrics or RouterMetrics()
        self._metrics_server: MetricsServer | None = None
        self._room = WaitingRoom()
        self._admission = Admission(config.router.max_inflight)
        self._sessions = SessionBook(registry)
        dial = faulty_dial(dial_with(open_tls(config.security)), faults)
        self.fleet = Fleet(registry, config.link, config.placement, self.metrics, self._fleet_changed, dial)
        self._kitchen = Kitchen(
            config, self.fleet, self._room, self._sessions, self.metrics, place,
            lambda request: OutputText(tokenizer, request.stop, request.sampling.min_tokens),
            stopwatch,
        )
        self._warm_up = WarmUp(self.generate, self._can_serve, TokenId(tokenizer.bos_id or 0))
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        """Something about the fleet has changed."""
        self._idle = asyncio.Event()
        self._idle.set()

    # FrontDoor.

    @property
    def settings(self) -> RouterSettings:
        return self._config.router

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def num_inflight(self) -> int:
        return self._admission.num_inflight

    def model_card(self) -> ModelCard:
        views = [view for view in self.fleet.snapshot().workers if view.attached and view.record.role.can_decode]
        model = self._config.model
        from_workers = views[0].record.model if views else Path(model.path).name
        max_context = max((view.record.max_context for view in views), default=0)
        return ModelCard(model.served_name or from_workers, max_context, self._created)

    def readiness(self) -> Readiness:
        if self._admission.is_draining:
            return Readiness(False, "this router is shutting down")
        if not self._can_serve():
            attached = sorted(view.record.worker_id for view in self.fleet.snapshot().workers if view.attached)
            if not attached:
                return Readiness(False, "no worker is attached")
            return Readiness(False, f"no compatible pair and no decode worker among {', '.join(attached)}")
        return Readiness(self._warm_up.is_warm, "" if self._warm_up.is_warm else self._warm_up.why_not)

    async def until_known(self) -> None:
        if self.model_card().max_context:
            return
        self._enter()
        try:
            async with asyncio.timeout(self._config.router.max_waiting_s):
                while not (self.model_card().max_context or self._admission.is_draining):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            log.warning("no worker came within %g s", self._config.router.max_waiting_s)
        finally:
            self._leave()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Output, None]:
        """See `FrontDoor.generate`. Closing the generator ends the coordinator before it returns."""
        served = self.open(request, Bell())
        try:
            async for output in served.delivery:
                yield output
        finally:
            await served.close()

    def open(self, request: GenerateRequest, bell: Bell) -> Served:
        self._enter()
        delivery = Delivery(self._config.router.max_delta_queue, bell)
        task = self._spawn(Coordinator(request, self._kitchen, delivery).run(), f"request {request.request_id}")
        return Served(delivery, task, self._leave)

    # Its life.

    async def start(self) -> None:
        """Returns at once; `readiness` tells when requests succeed. Raises ConfigError for a taken metrics port."""
        settings = self._config.router
        if settings.metrics_port:
            self._metrics_server = serve_metrics(settings.host, settings.metrics_port, self.metrics.registry)
        await self.fleet.start(self._static_workers)
        self._spawn(self._warm_up.run(), "warm-up")

    async def drain(self, grace_s: float) -> None:
        """Nobody new from now on; waits until those inside have finished, or the grace is over."""
        self._admission.drain()
        self._news.set()
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d requests were still under way when the grace of %g s ended", self.num_inflight, grace_s)

    async def stop(self) -> None:
        """Cancels what is left and closes every stream. Nothing of this router runs afterwards."""
        self._admission.drain()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._sessions.close()
        await self.fleet.stop()
        if self._metrics_server is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._metrics_server.close)
            self._metrics_server = None

    def _enter(self) -> None:
        self._admission.enter()
        self._idle.clear()

    def _leave(self) -> None:
        self._admission.leave()
        if self._admission.num_inflight == 0:
            self._idle.set()

    def _can_serve(self) -> bool:
        return place(SMALLEST, self.fleet.snapshot(), Hints(), self._config.placement) is not None

    def _fleet_changed(self) -> None:
        self._room.changed()
        self._warm_up.changed()
        self._news.set()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
