"""Servers as child processes: started, waited for, ended. Nothing survives the bench that started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

POLL_S = 0.05
STOP_S = 15.0


class ChildFailed(Exception):
    """It ended or was not ready in time; the message holds the end of its output."""


class Child:
    """`with`: a process group of its own, its output in a file."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._command = list(command)
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.NamedTemporaryFile(suffix=f"-{name}.log")  # noqa: SIM115  (lives as long as the child)

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ChildFailed(f"{self.name} has not been started")
        return self._process.pid

    def __enter__(self) -> Child:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=self._env,
            start_new_session=True,
        )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is not None:
            _signal_group(process.pid, signal.SIGTERM)
            resume(process.pid)  # a paused one hears nothing
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                pass
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
        self._log.close()

    def wait_for_file(self, path: Path, timeout_s: float) -> dict[str, Any]:
        """The JSON that it writes once it is ready. Raises ChildFailed."""
        self._wait(path.exists, timeout_s)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def wait_for_url(self, url: str, timeout_s: float) -> None:
        """Until it answers 200. Raises ChildFailed."""
        self._wait(lambda: _is_ok(url), timeout_s)

    def _wait(self, is_ready: Any, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            if self._process is None or self._process.poll() is not None:
                raise ChildFailed(f"{self.name} ended: {self._last_words()}")
            if time.monotonic() > deadline:
                raise ChildFailed(f"{self.name} was not ready within {timeout_s:.0f} s: {self._last_words()}")
            time.sleep(POLL_S)

    def _last_words(self) -> str:
        lines = Path(self._log.name).read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:])[-500:]


def pause(pid: int) -> None:
    """Its process group stands still: it keeps its memory and takes no processor time."""
    _signal_group(pid, signal.SIGSTOP)


def resume(pid: int) -> None:
    _signal_group(pid, signal.SIGCONT)


def cpu_s(pid: int) -> float:
    """Processor time that a process has used, all threads, to the nanosecond (Linux)."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def group_cpu_s(pid: int) -> float:
    """Processor time of a process group, those that still live, to a hundredth of a second (Linux)."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
        if int(fields[2]) == pid:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _is_ok(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass
