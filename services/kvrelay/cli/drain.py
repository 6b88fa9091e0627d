"""`kvrelay drain WORKER`: a plain worker process takes nothing new, gives its streams to others, and ends."""

from __future__ import annotations

import os
import signal
from typing import Annotated

import typer

from kvrelay.cli import options
from kvrelay.cli.show import say
from kvrelay.core.errors import ConfigError

EXAMPLES = (
    "kvrelay drain decode-1f2e3d --redis-url redis://127.0.0.1:6379/0",
)


def command(
    worker: Annotated[str, typer.Argument(help="Worker id, as its log or kvrelay ps shows it.")],
    redis_url: options.RegistryUrl = None,
    namespace: Annotated[str, typer.Option(help="placement.namespace of the worker.")] = "default",
) -> None:
    """Drain a worker that runs on this machine as `kvrelay worker`."""
    from kvrelay.cluster.members import registered_workers
    from kvrelay.cluster.state import read_states
    from kvrelay.core.config import load_config

    states = read_states()
    url = redis_url or load_config().placement.redis_url
    if not url and len(states) == 1:
        url = states[0].redis
    if not url:
        raise ConfigError("where is the worker registered? Give --redis-url or set KVRELAY_REDIS_URL")
    record = next((item for item in registered_workers(url, namespace) if item.worker_id == worker), None)
    if record is None:
        raise ConfigError(f"no worker {worker!r} is registered there")
    if any(item.pid == record.pid for state in states for item in state.pids):
        raise ConfigError(f"{worker} is a replica that Ray Serve manages: change the number of replicas instead")
    try:
        os.kill(record.pid, signal.SIGTERM)
    except ProcessLookupError:
        raise ConfigError(f"{worker} (pid {record.pid}) does not run on this machine") from None
    say(f"{worker} (pid {record.pid}) drains and ends.")
