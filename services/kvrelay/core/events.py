"""What a worker tells a router about a sequence. All events of one engine step travel in one message.

Each choice of each `Start` gets exactly one terminal event: `Finished`, `Failed` or `Refused`.

    LOCAL    FirstToken  Tokens*  Finished
    RECEIVE  Reserved    Committed  Tokens*  Finished     (a choice that ended with its first token: Failed(cancelled))
    SEND     FirstToken  Finished(handed_off | stop | length)

A Start whose output so far lacks nothing but the end is answered with Finished(stop | length) alone. A worker that
goes down says `Leaving` of every choice that runs there; after a `Migrate` that choice ends as Finished(handed_off), or
it has `Stayed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvrelay.core.ids import SeqKey, TokenId, TransferId


@dataclass(frozen=True, slots=True)
class Token:
    token_id: TokenId
    logprob: float | None = None
    """Natural log; None when not asked for."""
    top: tuple[tuple[TokenId, float], ...] = ()
    """The most likely tokens, best first."""


class FinishReason(Enum):
    STOP = "stop"
    """EOS or a stop token id. Text stops are the router's."""
    LENGTH = "length"
    HANDED_OFF = "handed_off"
    """The KV is elsewhere: the receiver of a SEND leg, or of a migration, has committed. No end for the client."""


class FailReason(Enum):
    PREEMPTED = "preempted"
    """Growth found no block. Replay."""
    TRANSFER = "transfer"
    """The handoff broke before the commit. Replay."""
    ENGINE = "engine"
    """The engine died or is going down. Replay elsewhere."""
    DRAINING = "draining"
    """The worker takes no more work and had not begun with this. Elsewhere, and nobody's fault."""
    NAN_LOGITS = "nan_logits"
    """The model gave no distribution for this row. No replay: it would do so again."""
    DEADLINE = "deadline"
    CANCELLED = "cancelled"


class RefuseReason(Enum):
    NO_ROOM = "no_room"
    NEVER_FITS = "never_fits"
    QUEUE_FULL = "queue_full"
    DRAINING = "draining"
    BAD_START = "bad_start"


REPLAYABLE = frozenset({FailReason.PREEMPTED, FailReason.TRANSFER, FailReason.ENGINE, FailReason.DRAINING})


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks are held for this transfer. The worker adds its receivers before it goes on the wire."""

    key: SeqKey
    """Of the first choice of the Start."""
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Refused:
    key: SeqKey
    reason: RefuseReason
    message: str
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class FirstToken:
    key: SeqKey
    index: int
    token: Token
    num_cached_tokens: int
    """Prompt tokens this worker found in its own prefix cache."""
    queue_ms: float
    """Start received → first chunk scheduled."""
    prefill_ms: float
    """First chunk scheduled → token drawn."""
    overlap_ms: float = 0.0
    """First KV ready to leave for the receiver → token drawn: what prefill's own computing hid of the transfer. 0 for a
    prompt of one chunk, whose KV all leaves at its end."""


@dataclass(frozen=True, slots=True)
class Tokens:
    key: SeqKey
    first_index: int
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """The only proof of a handoff. Echoes what the sender drew."""

    key: SeqKey
    first_index: int
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    key: SeqKey
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failed:
    key: SeqKey
    reason: FailReason
    message: str


@dataclass(frozen=True, slots=True)
class Leaving:
    """The worker goes down: please have this choice go on elsewhere. It runs on here until a `Migrate` comes."""

    key: SeqKey


@dataclass(frozen=True, slots=True)
class Stayed:
    """A `Migrate` came to nothing; the choice runs on here."""

    key: SeqKey
    transfer_id: TransferId
    """Of that Migrate."""
    message: str


Event = Reserved | Refused | FirstToken | Tokens | Committed | Finished | Failed | Leaving | Stayed
TERMINAL = (Refused, Finished, Failed)
