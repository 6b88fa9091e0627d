"""Rules of the house that a linter does not know."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from tests.house.tree import ROOT, functions, python_files, where

BROAD_EXCEPT_ALLOWED = {
    "services/kvrelay/rpc/interceptor.py": "the RPC interceptor",
    "services/kvrelay/engine/engine.py": "the top of the engine loop",
    "services/kvrelay/worker/supervisor.py": "the task supervisor",
    "services/kvrelay/cluster/policy.py": "the Serve policy wrapper",
}
"""Everywhere else a broad `except` would hide a bug from the tests and the user alike."""

ENVIRONMENT_ALLOWED = {"services/kvrelay/core/config.py", "services/kvrelay/cluster/env.py"}


def _is_broad(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = [node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)]
    return "Exception" in names or "BaseException" in names


def test_broad_excepts_stand_in_four_places_only() -> None:
    found = {
        where(path, node.lineno)
        for path in python_files("services", "kernels", "loadtest")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler) and _is_broad(node)
        and str(path.relative_to(ROOT)) not in BROAD_EXCEPT_ALLOWED
    }
    assert found == set()


def test_settings_come_from_the_environment_in_config_only() -> None:
    """`KVRELAY_*` is read in core/config.py; cluster/env.py prepares what Ray's processes inherit."""
    found = {
        where(path, line)
        for path in python_files("services", "kernels", "loadtest")
        for line, text in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"environ.*KVRELAY_|getenv.*KVRELAY_", text)
        and str(path.relative_to(ROOT)) not in ENVIRONMENT_ALLOWED
    }
    assert found == set()


def test_tests_never_sleep_to_wait() -> None:
    found = {
        where(path, node.lineno)
        for path in python_files("tests")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep"
    }
    assert found <= _polling_helpers(), found - _polling_helpers()


def _polling_helpers() -> set[str]:
    """`tests/support/waiting.py` polls other processes, which have no clock of ours to turn."""
    path = ROOT / "tests" / "support" / "waiting.py"
    lines = path.read_text().splitlines() if path.exists() else []
    return {where(path, number) for number, text in enumerate(lines, 1) if "time.sleep" in text}


def test_every_test_file_asserts_something() -> None:
    empty = [
        str(path.relative_to(ROOT))
        for path in python_files("tests")
        if path.name.startswith("test_") and not re.search(r"\bassert|pytest\.raises|assert_", path.read_text())
    ]
    assert empty == []


def test_no_module_is_named_after_nothing() -> None:
    vague = {"utils.py", "common.py", "helpers.py", "managers.py", "misc.py"}
    assert [str(path.relative_to(ROOT)) for path in python_files() if path.name in vague] == []


def test_no_todo_is_left_behind() -> None:
    pattern = re.compile(r"#.*\b(TODO|FIXME|XXX)\b")
    found = [
        where(path, number)
        for path in python_files("services", "kernels", "loadtest")
        for number, text in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(text)
    ]
    assert found == []


def test_public_functions_of_core_are_typed_and_small() -> None:
    """core is read first by everybody: every function has annotations, which mypy then checks."""
    bare = [
        where(path, node.lineno)
        for path in python_files("services")
        if "core" in path.parts
        for node in functions(path)
        if node.returns is None
    ]
    assert bare == []


def test_the_tree_has_no_surprises() -> None:
    expected = {"services", "proto", "kernels", "deploy", "helm", "tests", "loadtest"}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    folders = {name for name in folders if not name.endswith(".egg-info") and name not in {"build", "dist"}}
    assert folders <= expected


def test_top_level_folders_are_no_packages() -> None:
    roots = ("services", "kernels", "loadtest", "proto")
    assert [name for name in roots if (ROOT / name / "__init__.py").exists()] == []


def test_the_readme_tree_matches_the_disk() -> None:
    """Every folder named in the README's tree exists, and every package has its sentence."""
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"^\s*`?((?:services|proto|kernels|loadtest|deploy|helm|tests)/[\w/.-]*)", readme, re.M))
    assert [name for name in named if not (ROOT / name).exists()] == []
    packages = {path.name for path in (ROOT / "services" / "kvrelay").iterdir() if (path / "__init__.py").exists()}
    assert [name for name in packages if not re.search(rf"^\s*{name}/\s+\w", readme, re.M)] == []


def test_dependencies_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {
        line.split("==")[0].lower().replace("_", "-").split("[")[0]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += extra
    names = {re.split(r"[\[<>=;\s]", item)[0].lower() for item in wanted} - {"kvrelay"}
    assert names - pinned == set()


def test_nothing_committed_names_a_machine_path() -> None:
    pattern = re.compile(r"/(?:work|root|home)/\w+")
    suspects = [*python_files(), *ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("*.txt"), ROOT / "Makefile"]
    suspects += [path for folder in ("deploy", "helm", "proto") for path in _text_files(ROOT / folder)]
    found = [
        where(path, number)
        for path in suspects
        if path != Path(__file__).resolve()
        for number, text in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(text)
    ]
    assert found == []


def _text_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix in {".md", ".yaml", ".yml", ".proto"}]
