"""Compiles the C++ operators: once per instruction set and state of the sources, into the user's cache.

    sources, flags, compiler ─▶ digest ─▶ $XDG_CACHE_HOME/kvrelay/native/<digest>/libkvrelay_<set>.so
                                               written beside, renamed into place, under a lock

`python -m kvrelay_kernels.native.build` does it ahead of the first use; `--all` for sets that this machine lacks too.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
UNITS = ("native/unit.cpp", "native/team.cpp", "native/system.cpp")
FLAGS = (
    "-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden",
    "-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized",
)
EXPORTS = "{ global: kvr_*; local: *; };"
"""Linker script: inlined pieces of the standard library stay private to the set they were compiled for."""
TIME_LIMIT_S = 180.0

_log = logging.getLogger("kvrelay.kernels")


class BuildError(Exception):
    """No compiler, or it failed: says which and what it printed last."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    name: str
    needs: frozenset[str]
    """Flags of /proc/cpuinfo."""
    flags: tuple[str, ...]


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_AVX512_FLAGS = ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
INSTRUCTION_SETS = (
    InstructionSet(
        "amx_bf16", _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
        (*_AVX512_FLAGS, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    ),
    InstructionSet("avx512_bf16", _AVX512 | {"avx512_bf16"}, (*_AVX512_FLAGS, "-mavx512bf16")),
    InstructionSet("avx512", _AVX512, _AVX512_FLAGS),
    InstructionSet("avx2", _AVX2, ("-mavx2", "-mfma", "-mf16c")),
    InstructionSet("portable", frozenset(), ()),
)
"""Best first."""


@cache
def cpu_flags() -> frozenset[str]:
    """Of the first processor; empty where the kernel does not tell."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(found.split())


def usable_sets() -> list[InstructionSet]:
    return [candidate for candidate in INSTRUCTION_SETS if candidate.needs <= cpu_flags()]


def built(chosen: InstructionSet) -> Path:
    """The library for `chosen`, compiled now if it is not there. Raises BuildError."""
    compiler = _compiler()
    directory = _cache_directory() / _digest(compiler)
    target = directory / f"libkvrelay_{chosen.name}.so"
    if target.exists():
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / f"{chosen.name}.lock"):
            if not target.exists():
                _log.info("compiling the CPU kernels for %s, once (some seconds)", chosen.name)
                _compile(compiler, chosen, target)
    except OSError as error:
        raise BuildError(f"cannot build in {directory}: {error}") from error
    return target


def _compile(compiler: str, chosen: InstructionSet, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        exports, library = Path(scratch) / "exports.map", Path(scratch) / target.name
        exports.write_text(EXPORTS)
        command = [compiler, *FLAGS, *chosen.flags, f"-Wl,--version-script={exports}", "-o", str(library)]
        command += [str(PACKAGE / unit) for unit in UNITS]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{compiler} took longer than {TIME_LIMIT_S:.0f} s") from error
        if done.returncode != 0:
            raise BuildError(f"{compiler} failed:\n{done.stderr[-2000:]}")
        os.replace(library, target)


def _compiler() -> str:
    for name in ("g++", "c++", "clang++"):
        path = shutil.which(name)
        if path is not None:
            return path
    raise BuildError("no C++ compiler is installed (looked for g++, c++, clang++)")


def _cache_directory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "kvrelay" / "native"


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".h", ".cpp"))


def _digest(compiler: str) -> str:
    digest = hashlib.blake2b(digest_size=8)
    # Of sets only what is ordered: the repr of a frozenset differs from process to process.
    flags = [(one.name, one.flags) for one in INSTRUCTION_SETS]
    digest.update(repr((compiler, Path(compiler).stat().st_mtime_ns, FLAGS, flags, EXPORTS)).encode())
    digest.update(sources_digest().encode())
    return digest.hexdigest()


@cache
def sources_digest() -> str:
    """Of the code alone: the same wherever it was compiled (no compiler may reorder sums under `FLAGS`)."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sources():
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; ends with it whatever happens."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the CPU kernels ahead of their first use.")
    parser.add_argument("--all", action="store_true", help="every instruction set, not only this machine's best")
    wanted = INSTRUCTION_SETS if parser.parse_args().all else usable_sets()[:1]
    for candidate in wanted:
        print(built(candidate), flush=True)


if __name__ == "__main__":
    main()
