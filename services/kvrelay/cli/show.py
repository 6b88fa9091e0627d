"""How commands look: progress bars, the first answer with its time to first token taken apart, tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

console = Console(highlight=False)

_PHASES = (
    ("queue", "waiting for a place, at the router and at the worker"),
    ("reserve", "the decode worker sets KV blocks aside"),
    ("prefill", "the prefill worker computes the prompt"),
)
_REST = ("messages", "between router and workers")
_AROUND = ("around it", "client, HTTP, tokenizer: what the server's router does not see")


class Bars:
    """`kvrelay.core.progress.Progress` as a bar per task; plain lines where there is no terminal.

    A task that fails is never done: its bar stays where it was when the next one starts, or the command ends.
    """

    _drawn: ClassVar[Progress | None] = None
    """The bar that rich draws at this moment, with the cursor hidden."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._name = ""
        self._begin = 0.0

    def start(self, name: str, total: int) -> None:
        self.leave()
        self._name, self._begin = name, time.monotonic()
        if not console.is_terminal:
            return
        columns = [SpinnerColumn(), TextColumn("{task.description}")]
        if total:
            columns += [BarColumn(), MofNCompleteColumn() if total < 1000 else TextColumn("{task.percentage:>3.0f} %")]
        self._bar = Bars._drawn = Progress(*columns, TimeElapsedColumn(), console=console)
        self._bar.start()
        self._bar.add_task(name, total=total or None)

    def advance(self, n: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], n)

    def done(self) -> None:
        if self._bar is not None:
            task = self._bar.tasks[0]
            self._bar.update(task.id, total=task.total or 1, completed=task.total or 1)
            self.leave()
            self._bar = None
        elif self._name:
            console.print(f"{self._name}: done in {time.monotonic() - self._begin:.1f} s")

    @classmethod
    def leave(cls) -> None:
        """Stop drawing, as it stands. Gives the terminal its cursor back."""
        if cls._drawn is not None:
            cls._drawn.stop()
            cls._drawn = None


def say(text: str) -> None:
    console.print(text, soft_wrap=True)


def write_text(text: str) -> None:
    """Model output: as it is, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def show_timing(first_text_ms: float, usage: Mapping[str, Any]) -> None:
    """Where the time to the first token went: rows that add up to what the client measured, then the handover."""
    details = usage.get("prompt_tokens_details") or {}
    say(
        f"\n[dim]{usage.get('prompt_tokens', 0)} prompt tokens ({details.get('cached_tokens', 0)} cached), "
        f"{usage.get('completion_tokens', 0)} output tokens. First token after {first_text_ms:.1f} ms:[/dim]"
    )
    timing = usage.get("timing_ms")
    if not timing:
        return
    for name, ms, meaning in timing_rows(first_text_ms, timing):
        say(f"[dim]  {name:<10}{ms:>8.1f} ms  {meaning}[/dim]")
    hidden, unhidden = timing["transfer_hidden"], timing["transfer_unhidden"]
    handover = f"KV handover: {hidden:.1f} ms of it hidden behind prefill, {unhidden:.1f} ms after the first token"
    say(f"[dim]{handover if unhidden else 'No KV handover: the decode worker read the prompt itself'}[/dim]")


def timing_rows(first_text_ms: float, timing: Mapping[str, float]) -> list[tuple[str, float, str]]:
    """Name, milliseconds, meaning. The milliseconds add up to `first_text_ms`."""
    rows = [(name, timing[name], meaning) for name, meaning in _PHASES]
    rest = timing["first_token"] - sum(ms for _, ms, _ in rows)
    around = first_text_ms - timing["first_token"]
    return [*rows, (_REST[0], rest, _REST[1]), (_AROUND[0], around, _AROUND[1])]
