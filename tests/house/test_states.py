"""A state is changed by the one method that knows the arrows of its drawing."""

from __future__ import annotations

import ast

from tests.house.tree import ROOT, python_files

MOVERS = {"move", "_move"}
STATES = {"state", "_state", "stage"}
PACKAGES = ("services/kvrelay/engine", "services/kvrelay/transfer")


def changes_of_state(source: str) -> list[str]:
    """Methods other than the movers that assign a state to an object which has one already."""
    found = []
    for function in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)):
        if function.name in MOVERS | {"__init__"}:
            continue
        targets = [target for node in ast.walk(function) if isinstance(node, ast.Assign) for target in node.targets]
        found += [
            f"{function.name}: {ast.unparse(target)}"
            for target in targets
            if isinstance(target, ast.Attribute) and target.attr in STATES
        ]
    return found


def test_the_rule_sees_a_change_behind_the_drawing() -> None:
    assert changes_of_state("class A:\n    def close(self):\n        self.state = 1\n") == ["close: self.state"]


def test_states_change_in_move_only() -> None:
    found = {
        str(path.relative_to(ROOT)): changes
        for path in python_files(*PACKAGES)
        if (changes := changes_of_state(path.read_text()))
    }
    assert found == {}
