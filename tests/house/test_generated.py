"""The generated code in the tree is what the protos generate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.house.tree import ROOT


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "proto/kvrelay/pb").glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "proto"]
    command += [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", f"--grpc_python_out={tmp_path}", *protos]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    fresh = {path.name: path.read_text() for path in (tmp_path / "kvrelay/pb").iterdir()}
    kept = {
        path.name: path.read_text()
        for path in (ROOT / "services/kvrelay/pb").iterdir()
        if "_pb2" in path.name and path.is_file()
    }
    assert len(fresh) == 3 * len(protos)
    assert kept == fresh, "run `make proto`"
