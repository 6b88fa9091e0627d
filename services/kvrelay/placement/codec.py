"""Records as JSON, for Redis and for `kvrelay ps`. What cannot be read is None: garbage, or a newer version's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec

from kvrelay.core.placement import Load, SessionPlacement, WorkerRecord
from kvrelay.placement.registry import RegistryEvent

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """What a lease says: the worker, and its load when it last renewed."""

    record: WorkerRecord
    load: Load


def encode(value: WorkerEntry | SessionPlacement | RegistryEvent | WorkerRecord) -> bytes:
    return msgspec.json.encode(value)


def decode(raw: bytes | None, kind: type[T]) -> T | None:
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
