"""The smallest router that can relay: streams to workers that are read and beaten all the time, one queue per Start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvrelay.core.events import TERMINAL, Committed, Event, FirstToken, Reserved, Tokens
from kvrelay.core.handoff import Handoff
from kvrelay.core.ids import RequestId, TransferId
from kvrelay.core.placement import Load
from kvrelay.core.request import Leg, Start
from kvrelay.rpc.events import event_from_pb
from kvrelay.rpc.records import load_from_pb
from tests.worker.support import RouterEnd, key

BEAT_S = 0.1


class Attached(RouterEnd):
    """A stream with a life of its own. Every Start's events arrive in the queue of its request."""

    def __init__(self, address: str, router_id: str = "router") -> None:
        super().__init__(address, router_id)
        self.load = Load()
        self.load_changed = asyncio.Event()
        self._queues: dict[RequestId, asyncio.Queue[Event | None]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def attach(self) -> Attached:
        await self.hello()
        self._tasks = [asyncio.create_task(self._pump()), asyncio.create_task(self._beat())]
        return self

    def queue(self, request_id: RequestId) -> asyncio.Queue[Event | None]:
        """Ends with None when the stream does."""
        return self._queues.setdefault(request_id, asyncio.Queue())

    async def next(self, request_id: RequestId) -> Event:
        event = await self.queue(request_id).get()
        if event is None:
            raise ConnectionError(f"the stream to {self.router_id} ended")
        return event

    async def until_idle(self) -> None:
        """Until the worker itself says that nothing is left: no sequence, no reservation, no block held."""
        while True:
            load = self.load
            left = load.num_held + load.num_draining + load.num_reserved + load.num_sending
            if load.num_blocks and left + load.num_running + load.num_waiting == 0:
                return
            self.load_changed.clear()
            await self.load_changed.wait()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await super().close()

    async def _pump(self) -> None:
        while (message := await self.read()) is not None:
            is_beat = message.WhichOneof("kind") == "beat"
            self.load = load_from_pb(message.beat if is_beat else message.events.load)
            for item in message.events.events:
                event = event_from_pb(item)
                self.note_receivers(item)
                self.queue(event.key.request_id).put_nowait(event)
            self.load_changed.set()
        for queue in self._queues.values():
            queue.put_nowait(None)

    async def _beat(self) -> None:
        while not self.call.done():
            await self.beat()
            await asyncio.sleep(BEAT_S)


class Story:
    """What one request has seen so far, on both legs."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.tokens: dict[int, dict[int, int]] = {}
        """Choice → index → token."""

    def see(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, FirstToken):
            self._put(event.key.choice, event.index, [event.token.token_id])
        elif isinstance(event, Tokens | Committed):
            self._put(event.key.choice, event.first_index, [token.token_id for token in event.tokens])

    def output(self, choice: int = 0) -> list[int]:
        by_index = self.tokens.get(choice, {})
        assert sorted(by_index) == list(range(len(by_index))), "a token index is missing"
        return [by_index[index] for index in range(len(by_index))]

    def _put(self, choice: int, first_index: int, values: Sequence[int]) -> None:
        by_index = self.tokens.setdefault(choice, {})
        for index, value in enumerate(values, first_index):
            assert by_index.setdefault(index, value) == value, f"two tokens at index {index}"


class MiniRouter:
    def __init__(self, prefill: Attached, decode: Attached) -> None:
        self.prefill = prefill
        self.decode = decode

    async def local(self, start: Start) -> Story:
        """On the decode worker alone."""
        await self.decode.start(start)
        story = Story()
        await self._until_terminal(self.decode, start, story)
        return story

    async def relay(self, start: Start, on_event: Callable[[Story], None] = lambda story: None) -> Story:
        """Reserve on decode, prefill, hand over. `on_event` is called after each event, and may raise to leave."""
        story, transfer_id = Story(), TransferId(f"t-{start.request_id}@{start.attempt}")
        receive = replace(start, leg=Leg.RECEIVE, transfer_id=transfer_id)
        await self.decode.start(receive)
        first = await self.decode.next(start.request_id)
        story.see(first)
        on_event(story)
        if not isinstance(first, Reserved):
            return story
        receivers = self.decode.receivers[first.key]
        handoff = Handoff(transfer_id, receivers, first.num_cached_tokens)
        await self.prefill.start(replace(start, leg=Leg.SEND, transfer_id=transfer_id, handoff=handoff))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._until_terminal(self.prefill, start, story, on_event))
            group.create_task(self._until_terminal(self.decode, start, story, on_event))
        return story

    async def cancel(self, start: Start) -> None:
        for end in (self.prefill, self.decode):
            await end.cancel(key(start.request_id, attempt=start.attempt))

    @staticmethod
    async def _until_terminal(
        end: Attached, start: Start, story: Story, on_event: Callable[[Story], None] = lambda story: None
    ) -> None:
        open_choices = set(start.choices)
        while open_choices:
            event = await end.next(start.request_id)
            story.see(event)
            if isinstance(event, TERMINAL):
                open_choices.discard(event.key.choice)
            on_event(story)
