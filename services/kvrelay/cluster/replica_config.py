"""From the application's arguments to what one replica runs with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import serve

from kvrelay.core.config import Config, config_from_dict, load_config
from kvrelay.core.progress import NullProgress
from kvrelay.observe.logs import setup_logging


def replica_config(args: Mapping[str, Any]) -> Config:
    """The application's config. `KVRELAY_REDIS_URL` of this node wins: a secret need not be among the arguments."""
    config = config_from_dict(args["config"])
    redis_url = load_config().placement.redis_url or config.placement.redis_url
    return replace(config, placement=replace(config.placement, redis_url=redis_url))


def model_directory(args: Mapping[str, Any], config: Config) -> Path:
    if args["model_directory"]:
        return Path(args["model_directory"])
    from kvrelay.model.obtain import obtain

    directory: Path = obtain(config.model.path, NullProgress())
    return directory


def metrics_port(args: Mapping[str, Any], first_process: int) -> int:
    """Base port + position of this process among the cluster's processes on this node; 0: none."""
    base = int(args["metrics_port"])
    return base + first_process + int(serve.get_replica_context().rank.local_rank) if base else 0


def start_logging(args: Mapping[str, Any], name: str) -> None:
    """Once per replica, before anything of ours can have something to say."""
    if args["log_directory"]:
        path = Path(args["log_directory"]) / f"{name}.log"
        setup_logging(stream=path.open("a", buffering=1))
    else:
        setup_logging()


def node_address() -> str:
    return str(ray.util.get_node_ip_address())


def replica_name() -> str:
    """Unique over the life of the cluster: a replaced replica has a new one."""
    return str(serve.get_replica_context().replica_id.unique_id)


def application_name() -> str:
    return str(serve.get_replica_context().app_name)
