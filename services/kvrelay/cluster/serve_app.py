"""Ray and Serve as a local cluster uses them: started, asked and stopped through this one object."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import httpx
import ray
import ray.exceptions
from ray import serve
from ray.serve.api import RunTarget
from ray.serve.config import HTTPOptions, gRPCOptions
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from kvrelay.cluster.app import APP_NAME, AppArgs, build
from kvrelay.cluster.discovery import RayDirectory
from kvrelay.cluster.ports import ClusterPorts
from kvrelay.cluster.serve_grpc import GRPC_SERVICES
from kvrelay.core.config import Config, config_to_dict
from kvrelay.core.errors import ConfigError
from kvrelay.core.placement import WorkerRecord

_CALL_TIMEOUT_S = 10.0
_PROBE_TIMEOUT_S = 2.0
_WORKER_CPUS = 0.2
_ROUTER_CPUS = 0.1
_CONFIG_ERROR = "ConfigError: "
_POOLS = ("PrefillWorker", "DecodeWorker")


class ServeApp:
    """One application on one Ray that this process started."""

    def __init__(self, ports: ClusterPorts) -> None:
        self._ports = ports
        self._handle: DeploymentHandle | None = None
        self._is_up = True

    @classmethod
    def start(cls, directory: Path, ports: ClusterPorts, object_store_bytes: int) -> ServeApp:
        """Raises ConfigError with Ray's reason."""
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        try:
            ray.init(
                address="local",
                namespace=APP_NAME,
                _temp_dir=str(directory),
                _node_ip_address=_loopback(),
                include_dashboard=False,
                object_store_memory=object_store_bytes,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
            serve.start(
                proxy_location="HeadOnly",
                http_options=HTTPOptions(host="127.0.0.1", port=ports.http),
                grpc_options=gRPCOptions(port=ports.grpc, grpc_servicer_functions=list(GRPC_SERVICES)),
            )
        except (ray.exceptions.RayError, RuntimeError, ValueError, OSError) as error:
            ray.shutdown()
            raise ConfigError(f"Ray did not start: {error}") from error
        return cls(ports)

    def run(self, args: AppArgs) -> None:
        """Hand the application over; returns before it runs."""
        target = RunTarget(build(args), name=APP_NAME, route_prefix="/")
        self._handle = serve.run_many([target], wait_for_applications_running=False)[0]

    def num_workers_running(self) -> int:
        """Raises ConfigError if the application cannot run, without waiting for Serve to try it again and again."""
        app = serve.status().applications[APP_NAME]
        messages = [item.message for item in app.deployments.values()]
        hopeless = [text for text in messages if _CONFIG_ERROR in text]
        if app.status is ApplicationStatus.DEPLOY_FAILED or hopeless:
            raise ConfigError(_reason(hopeless or [app.message, *messages]))
        return sum(app.deployments[name].replica_states.get("RUNNING", 0) for name in _POOLS if name in app.deployments)

    def not_ready(self) -> str:
        """Why the front port does not serve yet; empty when it does."""
        self.num_workers_running()
        try:
            answer = httpx.get(f"http://127.0.0.1:{self._ports.http}/readyz", timeout=_PROBE_TIMEOUT_S)
        except httpx.HTTPError as error:
            return f"the front port does not answer ({error})"
        return "" if answer.status_code == 200 else answer.text

    def router_pids(self) -> list[int]:
        """Router replicas that could be asked. One call reaches one replica: ask a few times if there are several."""
        if self._handle is None:
            return []
        num_replicas = serve.status().applications[APP_NAME].deployments["Router"].replica_states.get("RUNNING", 0)
        pids: set[int] = set()
        for _ in range(4 * num_replicas):
            if len(pids) == num_replicas:
                break
            try:
                pids.add(self._handle.pid.remote().result(timeout_s=_CALL_TIMEOUT_S))
            except (ray.exceptions.RayError, TimeoutError):
                break
        return sorted(pids)

    def workers(self) -> list[WorkerRecord]:
        """As they have announced themselves in Ray's own store; empty if that does not answer."""
        try:
            return RayDirectory(APP_NAME).members()
        except (ray.exceptions.RayError, RuntimeError, OSError):
            return []

    def stop(self) -> None:
        """Serve first: it drains the replicas. Ray's own end is bounded, and the caller looks for survivors."""
        if not self._is_up:
            return
        self._is_up = False
        try:
            serve.shutdown()
        except (ray.exceptions.RayError, RuntimeError, TimeoutError, OSError) as error:
            logging.getLogger(__name__).warning("Serve did not shut down cleanly: %s", error)
        ray.shutdown()


def deploy(app: ServeApp, config: Config, directory: Path, logs: Path) -> None:
    """The application as a local cluster runs it: on GPUs if each worker can have one, else on fractions of the CPU."""
    num_workers = config.cluster.prefill + config.cluster.decode
    has_gpus = ray.cluster_resources().get("GPU", 0) >= num_workers
    app.run(
        AppArgs(
            config=config_to_dict(config),
            model_directory=str(directory),
            worker_gpus=1.0 if has_gpus else 0.0,
            worker_cpus=_share(_WORKER_CPUS, num_workers),
            router_cpus=_ROUTER_CPUS,
            host="127.0.0.1",
            metrics_port=config.router.metrics_port,
            log_directory=str(logs),
            loopback_only=True,
        )
    )


def _share(wanted: float, num_workers: int) -> float:
    """Ray counts CPUs only to place; twenty workers on two cores are slow, not impossible."""
    cpus: float = ray.cluster_resources().get("CPU", 1.0)
    return min(wanted, 0.5 * cpus / max(1, num_workers))


def _reason(messages: list[str]) -> str:
    """Our own error's message; anything else whole, with its way through Ray."""
    text = "\n".join(messages).strip()
    ours = [line.split(_CONFIG_ERROR, 1)[1] for line in text.splitlines() if _CONFIG_ERROR in line]
    return ours[-1].strip() if ours else f"the workers cannot start:\n{text}"


def _loopback() -> str:
    """Ray replaces 127.0.0.1 by an address of the network; Linux has the rest of 127/8, and Ray leaves it alone."""
    return "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
