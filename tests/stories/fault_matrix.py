"""Seven moments × faults: every answer is the oracle's, nothing is left anywhere, and what is cached is true.

    open a town ─▶ one guest ─▶ the moment ─▶ the fault ─▶ the guest's answer ─▶ quiet time ─▶ all workers empty

`make faults` prints the table; `test_fault_matrix.py` runs the same cells one by one.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from kvrelay.core.faults import Faults, parse_rules
from kvrelay.core.ids import SessionId, TokenId
from kvrelay.core.placement import Role
from kvrelay.core.request import SamplingParams
from tests.support.town import TownGuest
from tests.support.virtual_time import run_virtual
from tests.support.wired import WiredTown

GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
SEEDED = replace(GREEDY, temperature=1.0, seed=7, logprobs=1)
KINDS = {"greedy": GREEDY, "seeded": SEEDED}
PROMPT = [(3 * i) % 200 for i in range(70)]
ORPHAN_S = 0.3
"""How long a fault takes to show, beyond the time in which it is noticed, and again until nobody works for nobody."""
RECOVERY_S = 2.0
"""How much later than undisturbed an answer may end, beyond the time in which the fault is noticed."""


def _computing(town: WiredTown) -> bool:
    return any(each.plant.runner.plans for each in town.inhabitants.values())


MOMENTS: dict[str, Callable[[WiredTown], bool]] = {
    "issued": lambda town: any(each.attach.num_open for each in town.inhabitants.values()),
    "reserved": lambda town: "decode Reserved" in town.seen,
    "prefill begin": _computing,
    "first token": lambda town: "prefill FirstToken" in town.seen,
    "committed": lambda town: "decode Committed" in town.seen,
    "decode begin": lambda town: "decode Tokens" in town.seen,
    "finished": lambda town: "decode Finished" in town.seen,
}

Strike = Callable[[WiredTown, TownGuest], Awaitable[TownGuest | None]]
"""Returns who waits for the answer from now on; None: nobody."""


@dataclass(frozen=True, slots=True)
class Fault:
    strike: Strike
    noticed_s: float = 0.0
    """The longest that it may go unnoticed: a link that is silent, a Push that stands still."""


async def client_leaves(town: WiredTown, guest: TownGuest) -> TownGuest | None:
    await town.leaves(guest)
    return None


async def prefill_killed(town: WiredTown, guest: TownGuest) -> TownGuest:
    town.busy(Role.PREFILL).end()
    return guest


async def decode_killed(town: WiredTown, guest: TownGuest) -> TownGuest:
    town.busy(Role.DECODE).end()
    return guest


async def router_killed(town: WiredTown, guest: TownGuest) -> TownGuest:
    """Its streams break before it could say a word; the client goes on at another router with what it has."""
    town.cut()
    await town.leaves(guest)
    await town.close()
    await town.open()
    had = tuple(TokenId(each) for each in guest.ids())
    return town.seat(guest.request.sampling, guest.request.prompt_ids, resume=had, session=guest.request.session)


async def redis_gone(town: WiredTown, guest: TownGuest) -> TownGuest:
    town.faults.add(parse_rules([{"at": "registry", "do": "stall"}])[0])
    return guest


def rule(at: str, do: str, role: Role | None = None, **match: str) -> Strike:
    """Strikes the next message that matches; with `role`, of the worker of this role that serves the guest."""

    async def strike(town: WiredTown, guest: TownGuest) -> TownGuest:
        worker = {"worker": town.busy(role).record.worker_id} if role is not None else {}
        town.faults.add(parse_rules([{"at": at, "do": do, "match": {**match, **worker}, "times": 1}])[0])
        return guest

    return strike


SILENT_S = 3.0
"""`LinkSettings.silence_s` and a beat on either side of it."""
STALLED_S = 6.0
"""`TransferSettings.stall_s` and a heartbeat."""
FAULTS: dict[str, Fault] = {
    "client leaves": Fault(client_leaves),
    "prefill killed": Fault(prefill_killed),
    "decode killed": Fault(decode_killed),
    "router killed": Fault(router_killed),
    "data path cut": Fault(rule("pipe.send", "cut")),
    "data path half open": Fault(rule("pipe.send", "half_open"), STALLED_S),
    "control path cut (decode)": Fault(rule("link.down", "cut", Role.DECODE)),
    "control path cut (prefill)": Fault(rule("link.down", "cut", Role.PREFILL)),
    "router hears no decode": Fault(rule("link.down", "half_open", Role.DECODE), SILENT_S),
    "router hears no prefill": Fault(rule("link.down", "half_open", Role.PREFILL), SILENT_S),
    "decode hears no router": Fault(rule("link.up", "half_open", Role.DECODE), SILENT_S),
    "prefill hears no router": Fault(rule("link.up", "half_open", Role.PREFILL), SILENT_S),
    "frame corrupt": Fault(rule("pipe.send", "corrupt", frame="slab")),
    "sender stalls": Fault(rule("pipe.send", "stall"), STALLED_S),
    "commit frame duplicated": Fault(rule("pipe.send", "duplicate", frame="commit")),
    "commit frame lost": Fault(rule("pipe.send", "drop", frame="commit"), STALLED_S),
    "committed told twice": Fault(rule("link.down", "duplicate", event="committed")),
    "Redis gone": Fault(redis_gone),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    words: str
    seconds: float
    """From the moment until the answer was complete."""


async def _until(town: WiredTown, happened: Callable[[WiredTown], bool], patience_s: float, otherwise: str) -> None:
    deadline = town.loop.time() + patience_s
    while not happened(town):
        assert town.loop.time() < deadline, otherwise
        await asyncio.sleep(0.005)


async def _no_orphans(town: WiredTown, noticed_s: float) -> None:
    await asyncio.sleep(noticed_s + ORPHAN_S)
    await _until(town, lambda town: not town.has_orphans(), ORPHAN_S, "an engine works for nobody")


async def _nothing(town: WiredTown, guest: TownGuest) -> TownGuest:
    return guest


async def _story(moment: str, fault: Fault, sampling: SamplingParams) -> Outcome:
    faults = Faults()
    town = WiredTown(faults)
    await town.open()
    first = town.seat(sampling, PROMPT, session=SessionId("s"))
    await _until(town, MOMENTS[moment], 60.0, "the moment never came")
    began = town.loop.time()
    guest = await fault.strike(town, first)
    watching = asyncio.create_task(_no_orphans(town, fault.noticed_s))
    words = "gone, nothing left"
    if guest is not None:
        await town.finish(guest)
        assert guest.error is None, guest.error
        had = first.ids()[: len(guest.request.resume)]
        assert had + guest.ids() == first.expected(), "not the oracle's tokens"
        assert guest.tokens() == first.expected_tokens()[len(had) :], "not the oracle's log probabilities"
        words = "resumed" if guest is not first else _words(guest, faults)
    took = town.loop.time() - began
    await watching
    await town.assert_empty()
    town.check_blocks(first)
    await town.close()
    return Outcome(words, took)


def _words(guest: TownGuest, faults: Faults) -> str:
    if guest.summary.num_attempts > 1:
        return f"{guest.summary.num_attempts - 1} replay"
    return "went on" if faults.num_done else "untouched"


_UNDISTURBED: dict[tuple[str, str], float] = {}


def run_cell(moment: str, fault: str, kind: str) -> Outcome:
    """How the cell went, with the seconds that it cost. Raises AssertionError when it is red."""
    if (moment, kind) not in _UNDISTURBED:
        _UNDISTURBED[moment, kind] = run_virtual(_story(moment, Fault(_nothing), KINDS[kind])).seconds
    outcome = run_virtual(_story(moment, FAULTS[fault], KINDS[kind]))
    late_s = max(0.0, outcome.seconds - _UNDISTURBED[moment, kind])
    if fault == "client leaves":
        return Outcome(outcome.words, outcome.seconds)
    assert late_s <= FAULTS[fault].noticed_s + RECOVERY_S, f"{late_s:.1f} s late"
    return Outcome(outcome.words, late_s)


def main() -> int:
    """Print the table, with the seconds that each answer came later than undisturbed; 1 if a cell is red."""
    num_red = 0
    logging.disable(logging.WARNING)
    print("| fault | " + " | ".join(MOMENTS) + " |\n|---" + "|---" * len(MOMENTS) + "|")
    for fault in FAULTS:
        cells = []
        for moment in MOMENTS:
            try:
                outcomes = [run_cell(moment, fault, kind) for kind in KINDS]
                cells.append(f"{outcomes[0].words}, {max(each.seconds for each in outcomes):.1f} s")
            except AssertionError as error:
                num_red += 1
                cells.append(f"RED: {str(error).splitlines()[0] if str(error) else 'assertion'}")
        print(f"| {fault} | " + " | ".join(cells) + " |", flush=True)
    print(f"\n{len(FAULTS) * len(MOMENTS)} cells, each greedy and seeded; {num_red} red")
    return 1 if num_red else 0


if __name__ == "__main__":
    sys.exit(main())
