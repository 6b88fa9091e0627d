"""The router's image has no torch and no Ray."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import pkgutil, sys
import kvrelay.router
for module in pkgutil.iter_modules(kvrelay.router.__path__, "kvrelay.router."):
    __import__(module.name)
import kvrelay.cli.router
heavy = {"torch", "ray", "transformers", "kvrelay.worker", "kvrelay.model"}
print(*sorted(heavy & sys.modules.keys()))
"""


def test_importing_the_router_loads_neither_torch_nor_ray() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
