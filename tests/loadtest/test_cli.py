"""`kvrelay bench`: what is wrong is one line that names the flag."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrelay.cli.main import app
from kvrelay.core.errors import ConfigError

runner = CliRunner()


COMMANDS = ["engine", "peers", "quality", "serve", "relay", "router", "handoff", "compare", "report"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_bench_explains_itself(command: str) -> None:
    assert command in runner.invoke(app, ["bench", "--help"]).output
    result = runner.invoke(app, ["bench", command, "--help"])
    assert result.exit_code == 0
    assert "--json" in result.output


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["engine", "--batches", "1,many"], "1,many"),
        (["engine", "--weights", "nf2"], "nf2"),
        (["engine", "--contexts", "0"], "from 1"),
        (["peers", "--only", "llamafile"], "llamafile"),
        (["quality", "--weights", "nf2"], "nf2"),
        (["relay", "--systems", "sglang"], "sglang"),
        (["serve", "--url", "http://example.org"], "--allow-remote"),
        (["serve", "--url", "http://127.0.0.1:9", "--slo", "speed=1"], "--slo"),
        (["compare", "/nonexistent/a.json", "/nonexistent/b.json"], "a.json"),
    ],
)
def test_nonsense_is_refused_before_anything_starts(arguments: list[str], word: str) -> None:
    result = runner.invoke(app, ["bench", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert word in str(result.exception)


def test_a_page_is_made_of_saved_runs_only(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    result = runner.invoke(app, ["bench", "report", str(tmp_path / "other.json"), "-o", str(tmp_path / "page.html")])
    assert "no run" in str(result.exception)
    assert not (tmp_path / "page.html").exists()
