"""`make peers`: builds one virtual environment per peer. What fails is written down, so that a bench can say why.

    python -m kvrelay_loadtest.peers.install [NAME ...]

Standard library only: it runs before anything of the bench is needed. Finished environments are left alone.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from kvrelay_loadtest.peers.catalog import FAILED, PEERS, READY, Peer, home_of, peer_named, python_of

STEP_TIMEOUT_S = 1800.0


class InstallFailed(Exception):
    """One step did not succeed; the message is its last word."""


def main(names: Sequence[str]) -> int:
    peers = [peer_named(name) for name in names] or list(PEERS)
    failed = 0
    for peer in peers:
        print(f"{peer.name}: ", end="", flush=True)
        try:
            print(install(peer))
        except InstallFailed as error:
            failed += 1
            print(f"absent: {error}")
    return 1 if failed == len(peers) else 0


def install(peer: Peer) -> str:
    """The versions it has. Raises InstallFailed, and leaves the reason in the environment's folder."""
    home = home_of(peer)
    if (home / READY).exists():
        return (home / READY).read_text().strip()
    (home / FAILED).unlink(missing_ok=True)
    try:
        _run([sys.executable, "-m", "venv", "--clear", str(home)])
        for requirement in peer.requirements:
            _pip(peer, "install", requirement)
        if peer.wheel:
            _install_without_torch(peer)
        version = _version(peer)
    except InstallFailed as error:
        home.mkdir(parents=True, exist_ok=True)
        (home / FAILED).write_text(f"{error}\n")
        raise
    (home / READY).write_text(f"{version}\n")
    return version


def _install_without_torch(peer: Peer) -> None:
    """The wheel asks for a torch build that only its own index has; the one already installed does."""
    with tempfile.TemporaryDirectory() as scratch:
        _pip(peer, "download", "--no-deps", "--dest", scratch, peer.wheel)
        wheel = next(Path(scratch).glob("*.whl"))
        wanted = Path(scratch) / "requirements.txt"
        wanted.write_text("\n".join(requirements_of(_metadata(wheel))))
        _pip(peer, "install", "-r", str(wanted), *peer.requirements)
        _pip(peer, "install", "--no-deps", str(wheel))


def requirements_of(metadata: str) -> list[str]:
    """`Requires-Dist` lines without extras and without anything that starts with torch."""
    lines = [line.partition(":")[2].strip() for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    return [line for line in lines if "extra ==" not in line and not line.startswith("torch")]


def _metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def _version(peer: Peer) -> str:
    code = f"import importlib.metadata as m; print('{peer.distribution} ' + m.version('{peer.distribution}'))"
    return _run([str(python_of(peer)), "-c", code]).strip()


def _pip(peer: Peer, verb: str, *arguments: str) -> None:
    _run([str(python_of(peer)), "-m", "pip", verb, "--quiet", "--disable-pip-version-check", *arguments])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise InstallFailed(f"{' '.join(command[:4])} took longer than {STEP_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise InstallFailed((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
