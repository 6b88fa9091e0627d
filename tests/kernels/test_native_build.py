"""Compiling: once, into the cache; without a compiler torch computes, and one warning says what that costs."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay_kernels.native import build, library

PORTABLE = build.INSTRUCTION_SETS[-1]

FAKE_COMPILER = """#!/bin/sh
echo run >> {log}
while [ "$1" != -o ]; do shift; done
{act}
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A g++ that counts its runs and writes its output file; an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return write_compiler(tmp_path, "touch $2")


def write_compiler(directory: Path, act: str) -> Path:
    path = directory / "g++"
    path.write_text(FAKE_COMPILER.format(log=directory / "runs", act=act))
    path.chmod(0o755)
    return path


def test_a_library_is_compiled_once(compiler: Path) -> None:
    first = build.built(PORTABLE)
    assert first.exists()
    assert build.built(PORTABLE) == first
    assert (compiler.parent / "runs").read_text().splitlines() == ["run"]
    assert [path.name for path in first.parent.iterdir() if path.suffix != ".lock"] == [first.name]


def test_a_failing_compiler_is_named_with_its_last_words(compiler: Path) -> None:
    write_compiler(compiler.parent, "echo 'no such flag' >&2; exit 1")
    with pytest.raises(build.BuildError, match="no such flag"):
        build.built(PORTABLE)


def test_a_slow_compiler_is_given_up(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_compiler(compiler.parent, "exec sleep 60")
    monkeypatch.setattr(build, "TIME_LIMIT_S", 0.05)
    with pytest.raises(build.BuildError, match="longer than"):
        build.built(PORTABLE)


def test_without_a_compiler_torch_computes_and_one_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    library.load_set.cache_clear()
    with caplog.at_level(logging.WARNING, logger="kvrelay.kernels"):
        assert library.best_library.__wrapped__() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no C++ compiler" in caplog.text
    assert "times slower" in caplog.text


def test_a_machine_that_tells_nothing_gets_the_portable_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset())
    assert build.usable_sets() == [PORTABLE]


def test_every_process_names_the_library_alike(compiler: Path) -> None:
    """Hash randomisation must not make each process compile its own (it did, through the repr of a set)."""
    code = "import sys; from kvrelay_kernels.native import build; print(build._digest(sys.argv[1]))"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code, str(compiler)], env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(digests) == 1
