"""What commands draw: rows that add up, and bars that never claim more than happened."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvrelay.cli import show

TIMING = {
    "queue": 1.0, "reserve": 2.0, "prefill": 30.0, "first_token": 35.5,
    "transfer_hidden": 0.0, "transfer_unhidden": 4.0,
}  # fmt: skip


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    screen = io.StringIO()
    monkeypatch.setattr(show, "console", Console(file=screen, force_terminal=True, width=200, highlight=False))
    return screen


def test_the_rows_add_up_to_what_the_client_measured() -> None:
    rows = show.timing_rows(50.0, TIMING)
    assert sum(ms for _, ms, _ in rows) == pytest.approx(50.0)
    assert {name: ms for name, ms, _ in rows}["messages"] == pytest.approx(2.5)


def test_a_local_answer_had_no_handover(terminal: io.StringIO) -> None:
    usage = {"prompt_tokens": 3, "timing_ms": {**TIMING, "transfer_unhidden": 0.0}}
    show.show_timing(50.0, usage)
    assert "No KV handover" in terminal.getvalue()


def test_a_server_without_the_extension_is_shown_too(terminal: io.StringIO) -> None:
    show.show_timing(50.0, {"prompt_tokens": 3})
    assert "First token after 50.0 ms" in terminal.getvalue()


def test_a_task_that_failed_is_never_shown_as_done(terminal: io.StringIO) -> None:
    bars = show.Bars()
    bars.start("Loading", 2)
    bars.advance(1)
    show.Bars.leave()
    assert "2/2" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[?25h"), "the cursor is back"


def test_the_next_task_ends_the_drawing_of_a_failed_one(terminal: io.StringIO) -> None:
    bars = show.Bars()
    bars.start("Loading", 2)
    show.Bars().start("Stopping", 0)
    show.Bars.leave()
    assert "2/2" not in terminal.getvalue()
