"""`kvrelay version`."""

from __future__ import annotations

import platform
from importlib.metadata import version

import typer

EXAMPLES: tuple[str, ...] = ()


def command() -> None:
    """Print kvrelay's version and Python's."""
    typer.echo(f"kvrelay {version('kvrelay')} (Python {platform.python_version()})")
