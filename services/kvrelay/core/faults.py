"""Misfortune on purpose, for tests and rehearsals: rules that say which message, at which seam, meets what.

    - at: pipe.send                           pipe.send │ pipe.receive │ link.up │ link.down │ registry
      match: {frame: commit, nth: 3}          which messages; nothing: every one
      do: corrupt                             an `Action`: delay, drop, corrupt, duplicate, truncate, stall, ...
      times: 1                                at most so often; default: always
      probability: 0.5                        of those that match; default 1
      seed: 7                                 of the rule's own luck
      seconds: 0.5                            of a delay

The seams hold a `Faults` or nothing at all; where there is nothing, nobody asks. Rules come from the file that
`--faults` names and from tests, never from a request.
"""

from __future__ import annotations

import asyncio
import difflib
import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from kvrelay.core.errors import ConfigError

Facts = Mapping[str, str | frozenset[str]]
"""What is known of a message: one value per name, or several where one message carries several events."""


class Seam(Enum):
    PIPE_SEND = "pipe.send"
    """A frame of a Push leaves the sender."""
    PIPE_RECEIVE = "pipe.receive"
    """A frame of a Push reaches the receiver."""
    LINK_UP = "link.up"
    """A message of an Attach stream, from a router to a worker."""
    LINK_DOWN = "link.down"
    """And back."""
    REGISTRY = "registry"
    """A call to the registry."""


class Action(Enum):
    DELAY = "delay"
    """It comes `seconds` later, and what follows it waits."""
    DROP = "drop"
    CORRUPT = "corrupt"
    """Its bytes are others. A stream whose messages carry no checksum of ours breaks, as TLS and protobuf make it."""
    DUPLICATE = "duplicate"
    TRUNCATE = "truncate"
    """A slab loses its second half; after any other message the stream is over, in good order."""
    STALL = "stall"
    """Nothing passes any more, in this direction of this stream; its writer waits."""
    HALF_OPEN = "half_open"
    """Nothing arrives any more, in this direction of this stream; its writer does not notice."""
    CUT = "cut"
    """The stream breaks, in both directions."""
    KILL = "kill"
    """This process is gone, as by kill -9."""


_KEYS = {
    Seam.PIPE_SEND: ("frame", "transfer", "worker"),
    Seam.PIPE_RECEIVE: ("frame", "transfer", "worker"),
    Seam.LINK_UP: ("message", "request", "worker", "side"),
    Seam.LINK_DOWN: ("message", "event", "request", "worker", "side"),
    Seam.REGISTRY: ("call",),
}
_VALUES = {
    "frame": ("open", "slab", "heartbeat", "commit"),
    "message": ("hello", "start", "cancel", "migrate", "welcome", "events", "beat"),
    "event": (
        "reserved", "refused", "first_token", "tokens", "committed", "finished", "failed", "leaving", "stayed"
    ),
    "side": ("writer", "reader"),
    "call": (
        "register", "renew", "leave", "workers", "events", "get_session", "set_session", "prefix_holders", "add_prefix",
        "take_quota",
    ),
}
"""`side`: which end of the link does it; the writer, unless told otherwise, so that it is done once."""
_NOT_AT_REGISTRY = {Action.CORRUPT, Action.TRUNCATE, Action.HALF_OPEN}
_FIELDS = ("at", "match", "do", "times", "probability", "seed", "seconds")
_MAX_RULES = 64
E = TypeVar("E", bound=Enum)


@dataclass(frozen=True, slots=True)
class FaultRule:
    at: Seam
    do: Action
    match: Mapping[str, str] = field(default_factory=dict)
    nth: int = 0
    """Only the nth message that matches, counted from 1; 0: every one."""
    times: int = 0
    probability: float = 1.0
    seed: int = 0
    seconds: float = 0.0

    def fits(self, seam: Seam, facts: Facts) -> bool:
        return seam is self.at and all(_is_in(value, facts.get(name, "")) for name, value in self.match.items())

    def __str__(self) -> str:
        which = ", ".join(f"{name}={value}" for name, value in self.match.items()) or "everything"
        nth = f" number {self.nth}" if self.nth else ""
        return f"{self.do.value} at {self.at.value}: {which}{nth}"


def _is_in(value: str, found: str | frozenset[str]) -> bool:
    return value == found if isinstance(found, str) else value in found


@dataclass(slots=True)
class _Armed:
    rule: FaultRule
    chance: random.Random
    num_seen: int = 0
    num_done: int = 0

    def strikes(self) -> bool:
        """Called for each message that fits."""
        self.num_seen += 1
        rule = self.rule
        if rule.nth not in (0, self.num_seen) or (rule.times and self.num_done >= rule.times):
            return False
        if rule.probability < 1.0 and self.chance.random() >= rule.probability:
            return False
        self.num_done += 1
        return True


def kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Faults:
    """The rules of one process and how often each has struck. Any thread; a count may be off by one between two."""

    def __init__(self, rules: Sequence[FaultRule] = (), *, on_kill: Callable[[], None] = kill_process) -> None:
        self._on_kill = on_kill
        self._armed: list[_Armed] = []
        for rule in rules:
            self.add(rule)

    def add(self, rule: FaultRule) -> None:
        self._armed.append(_Armed(rule, random.Random(rule.seed)))

    def clear(self) -> None:
        """The weather is fine again. What was stalled or half open stays so until its stream has ended."""
        self._armed.clear()

    @property
    def num_done(self) -> int:
        return sum(armed.num_done for armed in self._armed)

    def meet(self, seam: Seam, facts: Facts) -> FaultRule | None:
        """The first rule that strikes this message, if one does."""
        for armed in self._armed:
            if armed.rule.fits(seam, facts) and armed.strikes():
                return armed.rule
        return None

    def kill(self) -> None:
        self._on_kill()


async def never() -> None:
    """Where a stalled message waits: until its task is cancelled."""
    await asyncio.get_running_loop().create_future()


def parse_rules(data: Any, where: str = "faults") -> list[FaultRule]:
    if not isinstance(data, list) or not data:
        raise ConfigError(f"{where}: expected a list of rules, each with `at:` and `do:`")
    if len(data) > _MAX_RULES:
        raise ConfigError(f"{where}: {len(data)} rules; at most {_MAX_RULES}")
    return [_rule(item, f"{where}, rule {number}") for number, item in enumerate(data, 1)]


def _rule(data: Any, where: str) -> FaultRule:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected `at:`, `do:` and perhaps more, found {data!r}")
    for name in data:
        _known(str(name), _FIELDS, f"{where}: unknown field")
    seam, action = _member(Seam, data.get("at"), f"{where}: at"), _member(Action, data.get("do"), f"{where}: do")
    if seam is Seam.REGISTRY and action in _NOT_AT_REGISTRY:
        raise ConfigError(f"{where}: a call to the registry cannot be {action.value}; cut or stall it")
    match, nth = _match(data.get("match") or {}, seam, where)
    seconds = _number(data, "seconds", 1.0 if action is Action.DELAY else 0.0, 3600.0, where)
    return FaultRule(
        seam, action, match, nth, times=int(_number(data, "times", 0, 1 << 30, where)),
        probability=_number(data, "probability", 1.0, 1.0, where), seed=int(_number(data, "seed", 0, 1 << 62, where)),
        seconds=seconds,
    )  # fmt: skip


def _match(data: Any, seam: Seam, where: str) -> tuple[dict[str, str], int]:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: match must be a mapping such as {{{_KEYS[seam][0]}: ...}}, found {data!r}")
    match = {str(name): str(value) for name, value in data.items() if name != "nth"}
    for name, value in match.items():
        _known(name, (*_KEYS[seam], "nth"), f"{where}: at {seam.value} one cannot match")
        if name in _VALUES:
            _known(value, _VALUES[name], f"{where}: no such {name}:")
    if seam in (Seam.LINK_UP, Seam.LINK_DOWN):
        match.setdefault("side", "writer")
    return match, int(_number(data, "nth", 0, 1 << 30, where))


def _member(kind: type[E], value: Any, where: str) -> E:
    _known(str(value), tuple(member.value for member in kind), where)
    return kind(str(value))


def _known(value: str, known: tuple[str, ...], where: str) -> None:
    if value not in known:
        close = difflib.get_close_matches(value, known, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"one of {', '.join(known)}"
        raise ConfigError(f"{where} `{value}`; {hint}")


def _number(data: Mapping[str, Any], name: str, default: float, largest: float, where: str) -> float:
    value = data.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= largest:
        raise ConfigError(f"{where}: {name} must be a number from 0 to {largest:g}, found {value!r}")
    return float(value)
