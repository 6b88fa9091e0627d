"""Traces of real services: when requests came and how long they were."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from kvrelay.core.errors import ConfigError

HASH_BLOCK = 512
"""Prompt tokens per `hash_id` of a Mooncake trace."""
SHIPPED = {"azure": "azure_conv.csv", "mooncake": "mooncake_conversation.jsonl"}
_FRACTION = re.compile(r"\.(\d+)$")


@dataclass(frozen=True, slots=True)
class TraceRow:
    at_s: float
    """Since the first row."""
    num_input: int
    num_output: int
    hash_ids: tuple[int, ...] = ()
    """One per started block of `HASH_BLOCK` prompt tokens; equal ids are equal prefixes. Empty: shares nothing."""


def load_trace(name: str) -> list[TraceRow]:
    """`azure`, `mooncake` (the shipped samples), or a file of either format. Raises ConfigError."""
    path = Path(__file__).parent / "traces" / SHIPPED[name] if name in SHIPPED else Path(name)
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}; shipped: {', '.join(SHIPPED)}") from None
    try:
        rows = parse_mooncake(lines) if lines and lines[0].startswith("{") else parse_azure(lines)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{path} is neither a Mooncake nor an Azure trace: {error}") from None
    if not rows:
        raise ConfigError(f"the trace {path} has no rows")
    return rows


def parse_mooncake(lines: Iterable[str]) -> list[TraceRow]:
    records = [json.loads(line) for line in lines if line.strip()]
    first = records[0]["timestamp"] if records else 0
    return [
        TraceRow(
            (record["timestamp"] - first) / 1e3, record["input_length"], record["output_length"],
            tuple(record["hash_ids"]),
        )
        for record in records
    ]  # fmt: skip


def parse_azure(lines: Iterable[str]) -> list[TraceRow]:
    records = list(csv.DictReader(lines))
    times = [_seconds(record["TIMESTAMP"]) for record in records]
    return [
        TraceRow(at_s - times[0], int(record["ContextTokens"]), int(record["GeneratedTokens"]))
        for at_s, record in zip(times, records, strict=True)
    ]


def choose(
    rows: Sequence[TraceRow], *, min_input: int = 0, max_input: int = 0, max_output: int = 0, count: int = 0
) -> list[TraceRow]:
    """Rows whose prompt is in range, the first `count` of them, timed from the first one. 0 is no limit."""
    chosen = [row for row in rows if row.num_input >= min_input and (not max_input or row.num_input <= max_input)]
    chosen = chosen[:count] if count else chosen
    if max_output:
        chosen = [replace(row, num_output=min(row.num_output, max_output)) for row in chosen]
    return [replace(row, at_s=row.at_s - chosen[0].at_s) for row in chosen]


def scale(rows: Sequence[TraceRow], *, rate: float = 1.0, length: float = 1.0) -> list[TraceRow]:
    """`rate` 2: twice as many per second. `length` 0.5: prompts and answers half as long, prefixes still shared."""
    return [
        replace(
            row, at_s=row.at_s / rate, num_input=max(1, round(row.num_input * length)),
            num_output=max(1, round(row.num_output * length)),
        )
        for row in rows
    ]  # fmt: skip


def _seconds(stamp: str) -> float:
    """ISO time with any number of decimals; datetime itself takes six."""
    decimals = _FRACTION.search(stamp)
    whole = datetime.fromisoformat(_FRACTION.sub("", stamp) + "+00:00").timestamp()
    return whole + (float(f"0.{decimals.group(1)}") if decimals else 0.0)
