"""Our own processes for a bench: plain `kvrelay router` and `kvrelay worker`, no Ray, on free ports."""

from __future__ import annotations

import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvrelay_loadtest.children import Child

READY_S = 120.0
_CLI = (sys.executable, "-m", "kvrelay.cli.main")


@dataclass(frozen=True, slots=True)
class WorkerWish:
    role: str
    threads: int


@dataclass(frozen=True, slots=True)
class PlainCluster:
    url: str
    router_pid: int
    metrics_url: str
    """Of the router."""
    pids: dict[str, int] = field(default_factory=dict)
    """By role; the router's too."""


@contextmanager
def plain_cluster(
    model: str, workers: Sequence[WorkerWish], *, kv_memory: str = "1GiB", always_relay: bool = False
) -> Iterator[PlainCluster]:
    """Ready when entered. Raises ChildFailed."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        children = []
        for number, wish in enumerate(workers):
            command = [*_CLI, "worker", "--model", model, "--role", wish.role, "--threads", str(wish.threads)]
            command += ["--kv-memory", kv_memory, "--ready-file", str(scratch / f"worker-{number}")]
            children.append(stack.enter_context(Child(f"{wish.role}-worker", command)))
        records = [
            child.wait_for_file(scratch / f"worker-{number}", READY_S) for number, child in enumerate(children)
        ]
        addresses = [record["address"] for record in records]
        cluster = stack.enter_context(router_before(model, addresses, always_relay=always_relay))
        pids = {wish.role: child.pid for wish, child in zip(workers, children, strict=True)}
        yield replace(cluster, pids=cluster.pids | pids)


@contextmanager
def router_before(model: str, addresses: Sequence[str], *, always_relay: bool = False) -> Iterator[PlainCluster]:
    """A router in front of workers that listen already."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config, ready, metrics_port = scratch / "kvrelay.yaml", scratch / "router", free_port()
        config.write_text(f"placement: {{always_relay: {str(always_relay).lower()}}}\n")
        command = [*_CLI, "router", "--model", model, "--workers", ",".join(addresses), "--http-port", "0"]
        command += ["--grpc-port", "0", "--metrics-port", str(metrics_port), "--config", str(config)]
        command += ["--ready-file", str(ready), "--drain-s", "1"]
        router = stack.enter_context(Child("router", command))
        url = str(router.wait_for_file(ready, READY_S)["http"])
        router.wait_for_url(f"{url}/readyz", READY_S)
        yield PlainCluster(url, router.pid, f"http://127.0.0.1:{metrics_port}/metrics", {"router": router.pid})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
