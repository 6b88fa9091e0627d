"""The engine of a worker: a mailbox, a thread, and a step that is a straight line.

    mailbox ─▶ deadlines ─▶ moves ─▶ reservations ─▶ schedule ─▶ outbox ─▶ run ─▶ commit ─▶ outbox
       ▲                                                                                    │
       └────────────────── wait at most 50 ms while there is nothing to do ◀────────────────┘

The first outbox carries what is known before the step: a reservation or a commit must not wait for it.

Only this thread touches sequences, blocks and reservations. An error that nobody foresaw ends it: the outbox hears of
it, nothing is repaired, and the process is expected to go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from kvrelay.core.batch import Runner
from kvrelay.core.clock import Clock
from kvrelay.core.config import EngineSettings
from kvrelay.core.events import FailReason, FinishReason
from kvrelay.core.handoff import Commit
from kvrelay.core.ids import SeqKey, TransferId
from kvrelay.core.placement import Load
from kvrelay.core.ports import EngineOutbox, TransferPort
from kvrelay.core.request import Migrate, Start
from kvrelay.engine.admission import Admission
from kvrelay.engine.commit import Committer
from kvrelay.engine.intake import Intake
from kvrelay.engine.load import LoadMeter
from kvrelay.engine.mailbox import Cancel, Drain, Landed, Mailbox, Message, PushEnded, SendEnded, SendLevel, Submit
from kvrelay.engine.moving import Moving
from kvrelay.engine.scheduler import Scheduler
from kvrelay.engine.spec import EngineSpec
from kvrelay.engine.work import Work
from kvrelay.kvcache.cache import KvCache

IDLE_WAIT_S = 0.05
"""Longest sleep between two looks at deadlines and beats."""
BEAT_S = 0.25
"""The outbox hears of the load at least this often."""


class Engine:
    """Implements `EngineInbox`. Tests call `step`; a worker calls `start` and `stop`."""

    def __init__(
        self,
        settings: EngineSettings,
        spec: EngineSpec,
        runner: Runner,
        transfer: TransferPort,
        outbox: EngineOutbox,
        clock: Clock,
        *,
        max_reservations: int = 256,
    ) -> None:
        self.cache = KvCache(spec.num_blocks, spec.block_size, spec.identity_fingerprint, spec.kv_dtype)
        self.work = Work(self.cache, transfer, clock, max_reservations)
        self._runner = runner
        self._outbox = outbox
        self._clock = clock
        admission = Admission(settings, spec, self.work)
        self._admission = admission
        self._intake = Intake(settings, spec, self.work, admission)
        self._scheduler = Scheduler(settings, self.work, admission, clock)
        self._committer = Committer(spec, self.work, clock)
        self._moving = Moving(self.work)
        self._meter = LoadMeter()
        self._mailbox = Mailbox()
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._alive_since = clock.now()
        self._told_at = float("-inf")
        self._load = self._meter.report(self.work, draining=False)

    def submit(self, start: Start) -> None:
        self._mailbox.post(Submit(start, self._clock.now()))

    def cancel(self, key: SeqKey) -> None:
        self._mailbox.post(Cancel(key))

    def landed(self, transfer_id: TransferId, commit: Commit, reply: Callable[[bool], None]) -> None:
        self._mailbox.post(Landed(transfer_id, commit, reply))

    def push_ended(self, transfer_id: TransferId, error: str) -> None:
        self._mailbox.post(PushEnded(transfer_id, error))

    def migrate(self, migrate: Migrate) -> None:
        self._mailbox.post(migrate)

    def send_level(self, transfer_id: TransferId) -> None:
        self._mailbox.post(SendLevel(transfer_id))

    def send_ended(self, transfer_id: TransferId, error: str) -> None:
        self._mailbox.post(SendEnded(transfer_id, error))

    def drain(self) -> None:
        self._mailbox.post(Drain())

    def start(self) -> None:
        """Spawn the engine thread."""
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ask the thread to end after its step; what it still holds fails as `engine`. False if it did not in time."""
        self._is_stopping = True
        self._mailbox.wake()
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.is_alive

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def age_ms(self) -> float:
        """Since the engine last finished a step or was idle. Any thread may ask; it grows only while a step runs."""
        return (self._clock.now() - self._alive_since) * 1000

    def load(self) -> Load:
        """As of the last step. Any thread may ask."""
        return replace(self._load, engine_age_ms=self.age_ms())

    def step(self) -> bool:
        """Everything that can be done now, once. False if there was nothing to compute."""
        for message in self._mailbox.take():
            self._handle(message)
        self._expire()
        self._moving.advance(everybody=self._intake.is_draining)
        self._admission.reserve_waiting()
        step = self._scheduler.schedule()
        if step is not None:
            if self.work.has_events:
                self._tell(has_computed=False)
            began = self._clock.now()
            result = self._runner.run(step.plan)
            self._meter.after_step(step.plan, self._clock.now() - began)
            self._committer.apply(step, result)
        self._tell(has_computed=step is not None)
        self._alive_since = self._clock.now()
        return step is not None

    def _tell(self, *, has_computed: bool) -> None:
        events, now = self.work.take_events(), self._clock.now()
        self._load = self._meter.report(self.work, draining=self._intake.is_draining)
        if events or has_computed or now - self._told_at > BEAT_S - IDLE_WAIT_S:
            self._told_at = now
            self._outbox.on_step(events, self._load)

    def _expire(self) -> None:
        """Deadlines hold wherever a sequence is: waiting, reserved, running, sending."""
        now = self._clock.now()
        late = [(key, seq) for key, seq in self.work.by_key.items() if seq.deadline <= now]
        for key, seq in late:
            self.work.fail(seq, key.choice, FailReason.DEADLINE, "the request's deadline has passed")

    def _handle(self, message: Message) -> None:
        match message:
            case Submit(start, arrived_at):
                self._intake.accept(start, arrived_at)
            case Cancel(key):
                seq = self.work.by_key.get(key)
                if seq is not None:
                    self.work.fail(seq, key.choice, FailReason.CANCELLED, "cancelled")
            case Landed(transfer_id, commit, reply):
                reply(self._committer.land(transfer_id, commit))
            case PushEnded(transfer_id, error):
                self._push_ended(transfer_id, error)
            case SendEnded(transfer_id, error):
                self._send_ended(transfer_id, error)
            case Drain():
                self._intake.drain()
            case Migrate():
                self._moving.accept(message)
            case SendLevel(transfer_id):
                self._moving.level(transfer_id)

    def _push_ended(self, transfer_id: TransferId, error: str) -> None:
        waiting = self.work.reservations.ended(transfer_id)
        if waiting is not None:
            self.work.fail_all(waiting, FailReason.TRANSFER, error or "the push ended without a commit")

    def _send_ended(self, transfer_id: TransferId, error: str) -> None:
        ended = self.work.sendings.ended(transfer_id)
        if ended is None:
            return
        seq, was_committing = ended
        if was_committing and not error:
            for choice in tuple(seq.choices):
                self.work.finish(seq, choice, FinishReason.HANDED_OFF)
        elif seq.migrate is not None:
            self._moving.stay(seq, error or "the push ended before its commit")
        else:
            self.work.fail_all(seq, FailReason.TRANSFER, error or "the push ended before the prompt was computed")

    def _loop(self) -> None:
        try:
            while not self._is_stopping:
                if not self.step():
                    self._mailbox.wait(IDLE_WAIT_S)
            self._give_up()
        except Exception as error:  # noqa: BLE001 (the top of the engine loop)
            self._outbox.on_death(error)
        finally:
            self._mailbox.close()

    def _give_up(self) -> None:
        for seq in {id(seq): seq for seq in self.work.by_key.values()}.values():
            self.work.fail_all(seq, FailReason.ENGINE, "the worker is going down")
        self._tell(has_computed=True)
