"""The thread around the step: beats, load, age, death, going down."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvrelay.core.clock import SystemClock
from kvrelay.core.config import EngineSettings
from kvrelay.core.events import Event, Failed, FailReason, Finished
from kvrelay.core.handoff import Commit
from kvrelay.core.ids import Choice, TransferId
from kvrelay.core.placement import Load
from kvrelay.core.request import Leg
from kvrelay.engine.engine import Engine
from kvrelay.engine.fakes import FakeRunner, FakeTransfer, RecordingOutbox
from kvrelay.engine.spec import EngineSpec
from tests.engine.rig import Rig, prompt
from tests.support.empty import assert_worker_is_empty

WAIT_S = 30.0


class SignallingOutbox(RecordingOutbox):
    """Lets a test wait for what the engine thread says."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()
        self.died = threading.Event()

    def on_step(self, events: Sequence[Event], load: Load) -> None:
        super().on_step(events, load)
        if any(isinstance(event, Finished | Failed) for event in events):
            self.ended.set()

    def on_death(self, error: BaseException) -> None:
        super().on_death(error)
        self.died.set()


def live_engine(runner: FakeRunner, outbox: RecordingOutbox) -> Engine:
    spec = EngineSpec(64, 16, 256, frozenset(), "model", "float32")
    return Engine(EngineSettings(), spec, runner, FakeTransfer(), outbox, SystemClock())


def test_one_call_per_step_carries_all_its_events() -> None:
    rig = Rig()
    for i in range(3):
        rig.start(prompt(10, i), request=str(i))
    rig.engine.step()
    assert rig.outbox.num_calls == 1
    assert len(rig.outbox.events) == 3


def test_an_idle_engine_beats_every_quarter_of_a_second() -> None:
    rig = Rig()
    for _ in range(100):
        assert not rig.engine.step()
        rig.clock.advance(0.05)
    assert 20 <= rig.outbox.num_calls <= 25
    assert not rig.outbox.events


def test_load_adds_up_and_measures() -> None:
    rig = Rig(max_batch_tokens=16)
    rig.runner.before_step = lambda plan: rig.clock.advance(0.008)
    rig.start(prompt(40))
    rig.start(prompt(30), request="waiting")
    rig.start(prompt(30), request="reserved", leg=Leg.RECEIVE)
    rig.engine.step()
    load = rig.engine.load()
    assert load.num_free + load.num_cached + load.num_held + load.num_draining == load.num_blocks == 64
    assert (load.num_running, load.num_waiting, load.num_reserved) == (1, 1, 1)
    assert load.waiting_tokens == 24 + 30
    assert abs(load.step_ms - 8) < 1e-6
    assert abs(load.prefill_tokens_per_s - 2000) < 1e-3
    assert rig.outbox.loads[-1].step_ms == load.step_ms


def test_age_grows_while_a_step_runs_only() -> None:
    rig = Rig()
    seen = []
    rig.runner.before_step = lambda plan: (rig.clock.advance(3), seen.append(rig.engine.age_ms()))[0]
    rig.start(prompt(10))
    rig.engine.step()
    assert seen == [3000]
    assert rig.engine.age_ms() == 0


def test_a_thread_serves_and_stops() -> None:
    outbox = SignallingOutbox()
    engine = live_engine(FakeRunner(), outbox)
    engine.start()
    rig = Rig()
    start = rig.start(prompt(20))
    engine.submit(start)
    assert outbox.ended.wait(WAIT_S)
    assert engine.is_alive
    assert engine.stop(WAIT_S)
    assert not engine.is_alive
    assert isinstance(outbox.events[-1], Finished)
    assert_worker_is_empty(engine)


def test_going_down_fails_what_is_left_and_turns_transfers_away() -> None:
    outbox, runner = SignallingOutbox(), FakeRunner()
    engine = live_engine(runner, outbox)
    running = threading.Event()
    runner.before_step = lambda plan: running.set()
    rig = Rig()
    start = rig.start(prompt(20), leg=Leg.SEND)
    engine.submit(start)
    engine.start()
    assert running.wait(WAIT_S)
    assert engine.stop(WAIT_S)
    assert [event.reason for event in outbox.events if isinstance(event, Failed)] == [FailReason.ENGINE]
    replies: list[bool] = []
    engine.landed(TransferId("t"), Commit(1, 1, ()), replies.append)
    assert replies == [False]
    engine.cancel(start.key(Choice(0)))


def test_an_error_nobody_foresaw_ends_the_engine() -> None:
    outbox, runner = SignallingOutbox(), FakeRunner()
    engine = live_engine(runner, outbox)
    runner.error = RuntimeError("out of memory")
    engine.submit(Rig().start(prompt(20)))
    engine.start()
    assert outbox.died.wait(WAIT_S)
    assert engine.stop(WAIT_S)
    assert outbox.death is runner.error
    assert not engine.is_alive
