"""Which workers this router knows, and what it believes about them: one link per address.

    static addresses ─┐                     ┌─▶ snapshot(): records and newest loads, corrected by what was just sent
    registry: workers ├─▶ links, each UP or ┤
    registry: events ─┘   DOWN              └─▶ changed(): somebody came, left or reported

Redis only says where to dial. A worker that is attached stays until its stream ends, whatever Redis has forgotten;
one that has left, or whose address another incarnation took over, is not dialled again under the old record.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from kvrelay.core.config import LinkSettings, PlacementSettings
from kvrelay.core.ids import Incarnation, WorkerId
from kvrelay.core.placement import Role, Snapshot, WorkerRecord, WorkerView
from kvrelay.observe.metrics import RouterMetrics
from kvrelay.placement.registry import EventKind, Registry, RegistryEvent
from kvrelay.router.link_port import LinkPort
from kvrelay.router.links import WorkerLink
from kvrelay.rpc.attach import Dial

log = logging.getLogger(__name__)


class Fleet:
    """Implements FleetPort, and LinkOwner for its links."""

    def __init__(
        self, registry: Registry, link_settings: LinkSettings, placement: PlacementSettings, metrics: RouterMetrics,
        changed: Callable[[], None], dial: Dial,
    ) -> None:
        self._registry = registry
        self._link_settings = link_settings
        self._refresh_s = placement.renew_s
        self._give_up_s = 2 * placement.lease_s
        self._metrics = metrics
        self._changed = changed
        self._dial_stream = dial
        self._router_id = uuid.uuid4().hex[:12]
        self._numbers = count()
        self._links: dict[str, WorkerLink] = {}
        self._tasks: dict[asyncio.Task[None], WorkerLink | None] = {}
        self._up: set[WorkerLink] = set()
        self._draining: set[tuple[WorkerId, Incarnation]] = set()

    async def start(self, static_addresses: Sequence[str]) -> None:
        for address in static_addresses:
            self._dial(address, give_up_s=None)
        loop = asyncio.get_running_loop()
        for watch in (self._watch(), self._refresh()):
            task = loop.create_task(watch)
            self._tasks[task] = None
            task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Every stream is closed: whatever the workers still do for this router, they abort."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._links.clear()

    def snapshot(self) -> Snapshot:
        return Snapshot(tuple(self._view(link) for link in self._links.values() if link.is_known))

    def link(self, worker_id: WorkerId) -> LinkPort | None:
        known = [link for link in self._links.values() if link.is_known and link.record.worker_id == worker_id]
        return max(known, key=lambda link: link.is_up, default=None)

    @property
    def num_legs(self) -> int:
        return sum(link.num_legs for link in self._links.values())

    # LinkOwner.

    def may_attach(self, link: WorkerLink, record: WorkerRecord) -> bool:
        return not any(
            other is not link and other.is_up and other.record.incarnation == record.incarnation
            for other in self._links.values()
        )

    def changed(self, link: WorkerLink) -> None:
        if link.is_up != (link in self._up):
            self._up ^= {link}
            attached = Counter(each.record.role for each in self._up)
            for role in Role:
                self._metrics.workers_attached(role.value, attached[role])
        self._changed()

    # Where to dial.

    def on_event(self, event: RegistryEvent) -> None:
        key = (event.worker_id, event.incarnation)
        match event.kind:
            case EventKind.JOIN if event.record is not None:
                self._join(event.record)
            case EventKind.DRAIN:
                self._draining.add(key)
                self._changed()
            case EventKind.LEAVE:
                self._draining.discard(key)
                self._retire(key)

    def _join(self, record: WorkerRecord) -> None:
        link = self._links.get(record.address)
        if link is None:
            self._dial(record.address, give_up_s=self._give_up_s)
        else:
            link.is_retired = False

    def _retire(self, key: tuple[WorkerId, Incarnation]) -> None:
        for link in self._links.values():
            if link.is_known and (link.record.worker_id, link.record.incarnation) == key:
                link.is_retired = not link.is_static

    def _dial(self, address: str, *, give_up_s: float | None) -> None:
        if address in self._links:
            return
        link = WorkerLink(
            address, f"{self._router_id}.{next(self._numbers)}", self._link_settings, self, give_up_s=give_up_s,
            dial=self._dial_stream,
        )
        self._links[address] = link
        task = asyncio.get_running_loop().create_task(link.run(), name=f"link {address}")
        self._tasks[task] = link
        task.add_done_callback(self._ended)

    async def _watch(self) -> None:
        async for event in self._registry.events():
            self.on_event(event)

    async def _refresh(self) -> None:
        """Events can be missed, and a link may have given up on a worker that was only cut off."""
        while True:
            await asyncio.sleep(self._refresh_s)
            for record in await self._registry.workers():
                self._join(record)

    def _ended(self, task: asyncio.Task[None]) -> None:
        link = self._tasks.pop(task)
        if link is not None and self._links.get(link.address) is link:
            del self._links[link.address]
            if link.is_known:
                self._draining.discard((link.record.worker_id, link.record.incarnation))
            self._changed()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the fleet failed", exc_info=error)

    def _view(self, link: WorkerLink) -> WorkerView:
        view = link.view()
        if (view.record.worker_id, view.record.incarnation) in self._draining:
            return replace(view, load=replace(view.load, draining=True))
        return view
