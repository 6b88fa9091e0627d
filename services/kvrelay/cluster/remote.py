"""The application into a Ray cluster that somebody else runs.

HAProxy in front of Serve is a matter of that cluster: its nodes must have been started with
`RAY_SERVE_ENABLE_HA_PROXY=1`. Without it Serve's own proxy carries the traffic.
"""

from __future__ import annotations

import logging

import ray
import ray.exceptions
from ray import serve
from ray.serve.config import HTTPOptions, gRPCOptions

from kvrelay.cluster.app import APP_NAME, AppArgs, build
from kvrelay.cluster.serve_grpc import GRPC_SERVICES
from kvrelay.core.config import Config, config_to_dict
from kvrelay.core.errors import ConfigError


def deploy_to(address: str, config: Config, *, host: str, worker_gpus: float, worker_cpus: float) -> None:
    """Returns when the application runs. Raises ConfigError."""
    args = AppArgs(
        config=config_to_dict(config),
        worker_gpus=worker_gpus,
        worker_cpus=worker_cpus,
        metrics_port=config.router.metrics_port,
    )
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        serve.start(
            proxy_location="EveryNode",
            http_options=HTTPOptions(host=host, port=config.router.http_port),
            grpc_options=gRPCOptions(port=config.router.grpc_port, grpc_servicer_functions=list(GRPC_SERVICES)),
        )
        serve.run(build(args), name=APP_NAME, route_prefix="/")
    except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
        raise ConfigError(f"cannot deploy to Ray at {address}: {error}") from error
    finally:
        ray.shutdown()
