"""The driver's side of the protocol: one runner as a child process, every answer with a time limit."""

from __future__ import annotations

import json
import selectors
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any

QUIT_S = 10.0


class RunnerFailed(Exception):
    """It died or did not answer; the message is its last word."""


class RunnerProcess:
    """`with`: started at entry; asked to quit, and killed if it does not, at the end."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._errors: IO[str] | None = None
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> RunnerProcess:
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._running()
        try:
            process.communicate('{"op": "quit"}\n', timeout=QUIT_S)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            process.kill()
            process.communicate()
        if self._errors is not None:
            self._errors.close()

    def call(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Raises RunnerFailed."""
        process = self._running()
        if process.stdin is None or process.stdout is None:
            raise RunnerFailed("the runner has no pipes")
        try:
            process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise RunnerFailed(self._last_word()) from None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise RunnerFailed(f"{op} took longer than {timeout_s:.0f} s")
        line = process.stdout.readline()
        if not line:
            raise RunnerFailed(self._last_word())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise RunnerFailed("the runner has not been started")
        return self._process

    def _last_word(self) -> str:
        status = self._running().wait(QUIT_S)
        if status < 0:
            return f"it was ended by {signal.Signals(-status).name}"
        if self._errors is None:
            return "it died"
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it died without a word"
