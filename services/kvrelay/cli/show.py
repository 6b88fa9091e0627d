"""How commands look: progress bars, the first answer with its time to first token taken apart, tables."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

console = Console(highlight=False)

_PHASES = (
    ("queue", "waiting for a place"),
    ("reserve", "decode reserves KV blocks"),
    ("prefill", "prefill computes the prompt"),
    ("first_token", "accepted → first token, in all"),
    ("transfer_hidden", "KV sent while prefill still computed"),
    ("transfer_unhidden", "KV still to send after the first token"),
)


class Bars:
    """`kvrelay.core.progress.Progress` as a bar per task; plain lines where there is no terminal."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._name = ""

    def start(self, name: str, total: int) -> None:
        self._name = name
        if not console.is_terminal:
            return
        columns = [SpinnerColumn(), TextColumn("{task.description}")]
        if total:
            columns += [BarColumn(), MofNCompleteColumn() if total < 1000 else TextColumn("{task.percentage:>3.0f} %")]
        self._bar = Progress(*columns, TimeElapsedColumn(), console=console)
        self._bar.start()
        self._bar.add_task(name, total=total or None)

    def advance(self, n: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], n)

    def done(self) -> None:
        if self._bar is not None:
            task = self._bar.tasks[0]
            self._bar.update(task.id, total=task.total or 1, completed=task.total or 1)
            self._bar.stop()
            self._bar = None
        elif self._name:
            console.print(f"{self._name}: done")


def say(text: str) -> None:
    console.print(text, soft_wrap=True)


def write_text(text: str) -> None:
    """Model output: as it is, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def show_timing(first_text_ms: float, usage: Mapping[str, Any]) -> None:
    """The response's usage extension as a table, and what the client itself measured."""
    timing = usage.get("timing_ms") or {}
    details = usage.get("prompt_tokens_details") or {}
    say(
        f"\n[dim]{usage.get('prompt_tokens', 0)} prompt tokens ({details.get('cached_tokens', 0)} cached), "
        f"{usage.get('completion_tokens', 0)} output tokens; time to first token here {first_text_ms:.0f} ms:[/dim]"
    )
    for name, meaning in _PHASES:
        if name in timing:
            say(f"[dim]  {name:<18}{timing[name]:>9.1f} ms  {meaning}[/dim]")
