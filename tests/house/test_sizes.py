"""Small files, small functions: a reader holds one of them in the head at a time."""

from __future__ import annotations

from tests.house.tree import ROOT, functions, python_files, where

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def test_no_file_is_longer_than_400_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in python_files()
        if (count := len(path.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert long == {}


def test_no_function_is_longer_than_60_lines() -> None:
    long = {
        f"{where(path, node.lineno)} {node.name}": length
        for path in python_files()
        for node in functions(path)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == {}
