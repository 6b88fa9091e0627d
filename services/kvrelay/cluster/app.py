"""The Serve application: one builder for `kvrelay up`, `kvrelay serve`, `serve deploy` and RayService.

    serve.run(build(AppArgs(config=...)))            in Python
    import_path: kvrelay.cluster.app:build           in a Serve config file, with `args:` named as the fields below

No `from __future__ import annotations` here: Serve reads the type of `build`'s argument off the signature and would
find a string.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve

from kvrelay.cluster.router_replica import RouterReplica
from kvrelay.cluster.worker_replica import WorkerReplica
from kvrelay.core.config import Config, config_from_dict

APP_NAME = "kvrelay"
_MAX_CALLS = 4096
"""Calls that Serve lets into one router replica. The router's own bound is `router.max_inflight`: it answers, in
the API's error form, what Serve would only turn away."""
_DRAIN_MARGIN_S = 10.0


class AppArgs(BaseModel):
    """Typed arguments of the application; every field has a default that suits a cluster of GPU machines."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    config: dict[str, Any] = {}
    """The sections of kvrelay.yaml."""
    model_directory: str = ""
    """A prepared model directory, the same on every node. Empty: every replica obtains `config.model.path` itself."""
    prefill: int | None = None
    """Workers per pool and router replicas; None: what `config.cluster` says."""
    decode: int | None = None
    routers: int | None = None
    worker_gpus: float = 1.0
    """GPUs per worker. 0: a CPU worker."""
    worker_cpus: float = 1.0
    router_cpus: float = 1.0
    host: str = ""
    """Where workers and metrics ports listen. Empty: the node's own address."""
    metrics_port: int = 0
    """Base of the metrics ports: routers first, then prefill, then decode workers. 0: none."""
    log_directory: str = ""
    """A file per process in this directory. Empty: on stderr, which Ray collects."""
    loopback_only: bool = False
    """Refuse gRPC peers that are not on this machine."""

    def counts(self) -> tuple[int, int, int]:
        """Routers, prefill workers, decode workers."""
        cluster = self.settings().cluster
        return (
            cluster.routers if self.routers is None else self.routers,
            cluster.prefill if self.prefill is None else self.prefill,
            cluster.decode if self.decode is None else self.decode,
        )

    def settings(self) -> Config:
        return config_from_dict(self.config)


def build(args: AppArgs) -> serve.Application:
    """Raises ConfigError for settings that cannot work, on the machine that deploys."""
    routers, prefill, decode = args.counts()
    pools = []
    if prefill:
        pools.append(_pool(args, "PrefillWorker", "prefill", prefill, routers))
    if decode:
        pools.append(_pool(args, "DecodeWorker", "decode", decode, routers + prefill))
    router = serve.deployment(
        serve.ingress()(RouterReplica),
        name="Router",
        num_replicas=routers,
        max_ongoing_requests=_MAX_CALLS,
        ray_actor_options={"num_cpus": args.router_cpus},
        graceful_shutdown_timeout_s=args.settings().worker.drain_s + _DRAIN_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=2,
        health_check_timeout_s=10,
    )
    return router.bind(args.model_dump(), *pools)


def _pool(args: AppArgs, name: str, role: str, num_replicas: int, first_process: int) -> serve.Application:
    deployment = serve.deployment(
        WorkerReplica,
        name=name,
        num_replicas=num_replicas,
        ray_actor_options={"num_cpus": args.worker_cpus, "num_gpus": args.worker_gpus},
        graceful_shutdown_timeout_s=args.settings().worker.drain_s + _DRAIN_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=2,
        health_check_timeout_s=30,
    )
    return deployment.bind(args.model_dump(), role, first_process)
