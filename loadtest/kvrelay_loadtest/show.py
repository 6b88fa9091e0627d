"""How benches speak: tables and JSON on stdout, progress on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

err = Console(stderr=True, highlight=False)
out = Console(highlight=False)


class Bars:
    """`kvrelay.core.progress.Progress` on stderr; a line per task where that is no terminal."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def start(self, name: str, total: int) -> None:
        if not err.is_terminal:
            err.print(f"{name} ...", soft_wrap=True)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=err, transient=True)
        self._bar.start()
        self._bar.add_task(name, total=total or None)

    def advance(self, n: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], n)

    def done(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def note(text: str) -> None:
    err.print(text, soft_wrap=True)


def print_json(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> Table:
    """Numbers to the right; a float in as many digits as mean something; None as a dash."""
    made = Table(title=title, caption=caption or None, box=None, title_justify="left", caption_justify="left")
    for place, name in enumerate(columns):
        is_text = all(isinstance(row[place], str) for row in rows)
        made.add_column(name, justify="left" if is_text else "right")
    for row in rows:
        made.add_row(*(shown(value) for value in row))
    return made


def print_table(*arguments: Any, **keywords: Any) -> None:
    out.print(table(*arguments, **keywords))


def shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        magnitude = abs(value)
        return f"{value:,.0f}" if magnitude >= 1000 else f"{value:.1f}" if magnitude >= 10 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
