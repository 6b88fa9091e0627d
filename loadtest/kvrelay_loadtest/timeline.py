"""`bench engine --timeline`: where the time of one decode step goes, on the engine thread and beside it.

    engine thread   mailbox │ schedule │ inputs │ forward │ sample │ commit │ outbox │ next step …
    attach loop                                                                └─hop─▶ delivery (beside the next step)

Measured at the seams that the engine has anyway: its clock (asked first when the mailbox is empty), the runner, the
decoder, the outbox. The outbox is a worker's own, with a loop on a thread of its own that makes the message for one
router; only the socket is missing. `hidden` is the part of a delivery that falls into the next step's forward pass:
the native kernels hold no interpreter lock there. The rest competes with the engine thread for it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvrelay.core.batch import Row, RowResult, StepPlan, StepResult
from kvrelay.core.config import EngineSettings, LinkSettings
from kvrelay.core.events import Event
from kvrelay.core.placement import Load
from kvrelay.engine.spec import EngineSpec
from kvrelay.model.load import LoadedModel
from kvrelay.model.rope import RopeTable
from kvrelay.model.runner import TorchRunner
from kvrelay.model.sampler import Sampler
from kvrelay.model.storage import DTYPES
from kvrelay.rpc.events import step_to_pb
from kvrelay.worker.outbox import StepOutbox
from kvrelay_kernels.decoder.native import DecoderParts, StepBatch
from kvrelay_kernels.dispatch import Ops, ops_for
from kvrelay_loadtest.engine_load import Yard
from kvrelay_loadtest.show import note, print_table
from kvrelay_loadtest.stats import median

PHASES = ("mailbox", "schedule", "inputs", "forward", "sample", "commit", "outbox")
MEANING = {
    "mailbox": "take what others left, nothing in a steady stream",
    "schedule": "deadlines, reservations, who computes what",
    "inputs": "block tables and token ids as arrays",
    "forward": "all layers and the head, one native call without the interpreter lock",
    "sample": "the draw of every row",
    "commit": "append tokens, grow, finish; collect events",
    "outbox": "hand all events over, wake the attach loop",
}
CONTEXT = 128
WARM_STEPS = 8
JOIN_S = 5.0


@dataclass(slots=True)
class Marks:
    """When each phase of the current step ended; one dict per step. Engine thread only."""

    steps: list[dict[str, float]] = field(default_factory=list)

    def begin(self) -> None:
        self.steps.append({"": time.perf_counter()})

    def end_of(self, phase: str) -> None:
        """The first time in a step counts."""
        if self.steps:
            self.steps[-1].setdefault(phase, time.perf_counter())

    def now(self) -> float:
        """As the engine's clock: a step asks it first when it has emptied the mailbox."""
        self.end_of("mailbox")
        return time.perf_counter()


@dataclass(frozen=True, slots=True)
class MarkedDecoder:
    decoder: Any
    marks: Marks

    def step(self, batch: StepBatch) -> Tensor:
        self.marks.end_of("inputs")
        logits: Tensor = self.decoder.step(batch)
        self.marks.end_of("forward")
        return logits


class MarkedSampler(Sampler):
    """Without a decoder that computes a step in one call, `inputs` and `forward` are one."""

    def __init__(self, ops: Ops, num_tokens: int, eos_token_ids: frozenset[int], marks: Marks) -> None:
        super().__init__(ops, num_tokens, eos_token_ids)
        self._marks = marks

    def sample(self, rows: Sequence[Row], logits: Tensor) -> list[RowResult]:
        self._marks.end_of("inputs")
        self._marks.end_of("forward")
        return super().sample(rows, logits)


@dataclass(frozen=True, slots=True)
class MarkedRunner:
    runner: TorchRunner
    marks: Marks

    def run(self, plan: StepPlan) -> StepResult:
        self.marks.end_of("schedule")
        result = self.runner.run(plan)
        self.marks.end_of("sample")
        return result


class MarkedOutbox:
    """A worker's outbox, and when the attach loop was busy with what it got."""

    def __init__(self, loop: asyncio.AbstractEventLoop, marks: Marks) -> None:
        self.deliveries: list[tuple[float, float]] = []
        self._marks = marks
        limit = LinkSettings().max_outbox_bytes
        self._outbox = StepOutbox(loop, limit, on_step=self._deliver, on_overflow=_never, on_death=_never)

    def on_step(self, events: Sequence[Event], load: Load) -> None:
        self._marks.end_of("commit")
        self._outbox.on_step(events, load)

    def on_death(self, error: BaseException) -> None:
        raise error

    def _deliver(self, events: Sequence[Event], load: Load) -> None:
        began = time.perf_counter()
        step_to_pb(events, load).SerializeToString()
        self.deliveries.append((began, time.perf_counter()))


def run_timeline(
    loaded: LoadedModel, settings: EngineSettings, spec: EngineSpec, batch: int, steps: int
) -> dict[str, Any]:
    """Medians in microseconds."""
    marks = Marks()
    with _loop_on_a_thread() as loop:
        outbox = MarkedOutbox(loop, marks)
        yard = Yard(settings, spec, MarkedRunner(_runner(loaded, marks), marks), outbox=outbox, clock=marks)
        yard.decode(batch, CONTEXT, WARM_STEPS + steps)
        for _ in range(WARM_STEPS):
            yard.step()
        marks.steps.clear()
        for _ in range(steps):
            marks.begin()
            yard.step()
            marks.end_of("outbox")
    return summary(marks.steps, outbox.deliveries) | {"batch": batch, "context": CONTEXT, "steps": steps}


def _runner(loaded: LoadedModel, marks: Marks) -> TorchRunner:
    """The same as the model's own, seen at its seams."""
    spec, device = loaded.spec, loaded.storage.pool.device
    ops = ops_for(device, DTYPES[loaded.dtype], spec.head_dim)
    make = ops.decoder

    def marked(parts: DecoderParts) -> Any:
        return None if make is None else MarkedDecoder(make(parts), marks)

    seen = ops if make is None else replace(ops, decoder=marked)
    rope = RopeTable(spec.rope, spec.head_dim, spec.max_context, device)
    sampler = MarkedSampler(ops, loaded.num_tokens, loaded.eos_token_ids, marks)
    with torch.inference_mode():
        return TorchRunner(spec, loaded.weights, loaded.storage, rope, sampler, seen)


def summary(steps: Sequence[dict[str, float]], deliveries: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """`phases`: [{name, us}] in order; `delivery_us`, and `hidden`: the share of it inside the next forward pass."""
    spans: dict[str, list[float]] = {name: [] for name in PHASES}
    forwards: list[tuple[float, float]] = []
    for step in steps:
        before = step[""]
        for name in PHASES:
            spans[name].append((step[name] - before) * 1e6)
            before = step[name]
        forwards.append((step["inputs"], step["forward"]))
    begin, end = steps[0][""], steps[-1]["forward"]
    inside = [span for span in deliveries if begin <= span[0] and span[1] <= end]
    total = sum(late - early for early, late in inside)
    hidden = sum(_overlap(span, forward) for span in inside for forward in forwards)
    return {
        "phases": [{"name": name, "us": median(values)} for name, values in spans.items()],
        "step_us": median([(step["outbox"] - step[""]) * 1e6 for step in steps]),
        "delivery_us": median([(late - early) * 1e6 for early, late in inside]) if inside else None,
        "hidden": hidden / total if total else None,
    }


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


@contextmanager
def _loop_on_a_thread() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="attach", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(JOIN_S)
        loop.close()


def _never(*_: object) -> None:
    raise AssertionError("an outbox of a few steps neither overflows nor dies")


def print_timeline(document: dict[str, Any]) -> None:
    at, rows = 0.0, []
    for phase in document["phases"]:
        share = phase["us"] / document["step_us"]
        rows.append((phase["name"], at, phase["us"], f"{share:.1%}", MEANING[phase["name"]]))
        at += phase["us"]
    title = f"one decode step of {document['batch']} sequences: {document['step_us'] / 1e3:.2f} ms on the engine thread"
    print_table(title, ("phase", "begins, µs", "µs", "share", ""), rows)
    if document["delivery_us"] is not None:
        note(
            f"on the attach loop, beside the next step: {document['delivery_us']:.0f} µs to make the message; "
            f"{document['hidden']:.0%} of it inside that step's forward pass"
        )
