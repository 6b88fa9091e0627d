"""The repository as the house tests see it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_ROOTS = ("services", "kernels", "loadtest", "tests")


def python_files(*roots: str) -> list[Path]:
    """Every hand-written module below the given top-level folders."""
    found = [path for root in roots or PACKAGE_ROOTS for path in sorted((ROOT / root).rglob("*.py"))]
    return [path for path in found if "pb" not in path.relative_to(ROOT).parts]


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"
