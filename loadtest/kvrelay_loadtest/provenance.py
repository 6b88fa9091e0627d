"""What a number was measured on: without it a table is an anecdote."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("kvrelay", "torch", "grpcio", "httpx", "uvicorn", "tokenizers")


def provenance(command: Sequence[str] | None = None) -> dict[str, Any]:
    """Command, date, versions, processor, and how busy the machine was already."""
    arguments = sys.argv[1:] if command is None else command
    return {
        "command": " ".join(["kvrelay", *arguments]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "cpu": _cpu(),
        "cores": os.cpu_count() or 0,
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def caption(meta: dict[str, Any]) -> str:
    """One line for under a table."""
    load = meta["load_average"][0]
    return f"{meta['date']} · {meta['cores']} cores {meta['cpu']} · load average {load} at the start"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
