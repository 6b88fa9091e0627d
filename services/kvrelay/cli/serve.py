"""`kvrelay serve`: the application into a Ray cluster that runs already."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrelay.cli import options
from kvrelay.cli.settings import cluster_config
from kvrelay.cli.show import say
from kvrelay.core.errors import ConfigError

EXAMPLES = (
    "ray start --head",
    "kvrelay serve --model /models/llama --prefill 2 --decode 4 --redis-url redis://redis:6379/0",
)


def command(
    address: Annotated[str, typer.Option(help="Ray address.")] = "auto",
    model: options.ModelPath = None,
    prefill: options.Prefill = None,
    decode: options.Decode = None,
    worker_gpus: Annotated[float, typer.Option(help="GPUs per worker; 0: CPU workers.")] = 1.0,
    worker_cpus: Annotated[float, typer.Option(help="CPUs per worker.")] = 1.0,
    host: Annotated[str, typer.Option(help="Address of the HTTP and gRPC ports on every node.")] = "0.0.0.0",
    http_port: options.HttpPort = None,
    grpc_port: options.GrpcPort = None,
    metrics_port: options.MetricsPort = None,
    redis_url: options.RegistryUrl = None,
    config: options.ConfigFile = None,
) -> None:
    """Deploy into an existing Ray cluster and return when the application runs."""
    settings = cluster_config(
        config, model=model, prefill=prefill, decode=decode, redis_url=redis_url, http_port=http_port,
        grpc_port=grpc_port, metrics_port=metrics_port,
    )  # fmt: skip
    if not settings.placement.redis_url:
        raise ConfigError("workers and routers meet in Redis: give --redis-url or set KVRELAY_REDIS_URL")
    from kvrelay.cluster.remote import deploy_to

    deploy_to(address, settings, host=host, worker_gpus=worker_gpus, worker_cpus=worker_cpus)
    say(f"Deployed: HTTP :{settings.router.http_port}, gRPC :{settings.router.grpc_port} on every node with a proxy.")
