"""Which ports a local cluster listens on: the three a user knows, and the ones Serve and HAProxy need behind them."""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass

from kvrelay.core.errors import ConfigError

RAY_WORKER_PORTS = range(10002, 20000)
"""Ray hands these to its own worker processes and refuses to start when a service claims one."""
_BACKSTAGE = range(20000, 32000)
"""Where backstage ports are drawn from: above Ray's, below what Linux gives to outgoing connections (32768)."""
_SPAN = 64
_DRAWS = 200


@dataclass(frozen=True, slots=True)
class ClusterPorts:
    http: int
    grpc: int
    metrics: int
    """The router's; process i of the cluster takes `metrics + i`. 0: no metrics ports."""
    backstage: int
    """First of 64 free ports in a row: HAProxy's metrics and statistics, Serve's fall-back proxy, the router replicas'
    own HTTP and gRPC ports behind HAProxy."""

    @property
    def haproxy_metrics(self) -> int:
        return self.backstage

    @property
    def haproxy_stats(self) -> int:
        return self.backstage + 1

    @property
    def fallback_http(self) -> int:
        return self.backstage + 2

    @property
    def fallback_grpc(self) -> int:
        return self.backstage + 3

    @property
    def replica_http(self) -> range:
        return range(self.backstage + 4, self.backstage + 34)

    @property
    def replica_grpc(self) -> range:
        return range(self.backstage + 34, self.backstage + _SPAN)


def choose_ports(http: int, grpc: int, metrics: int, num_processes: int) -> ClusterPorts:
    """Check the user's ports and find the rest. Raises ConfigError that names the flag to change."""
    wanted = [("--http-port", http), ("--grpc-port", grpc)]
    if metrics:
        wanted += [("--metrics-port", metrics + i) for i in range(num_processes)]
    taken: dict[int, str] = {}
    for flag, port in wanted:
        if port in taken:
            raise ConfigError(f"{flag} and {taken[port]} both want port {port}; choose another with {flag}")
        taken[port] = flag
        check_port(flag, port)
    return ClusterPorts(http, grpc, metrics, _free_span())


def check_port(flag: str, port: int) -> None:
    """Raises ConfigError if this port cannot be listened on."""
    if not 1 <= port <= 65535:
        raise ConfigError(f"{flag} {port} is no port number")
    if port in RAY_WORKER_PORTS:
        raise ConfigError(
            f"{flag} {port} lies between {RAY_WORKER_PORTS.start} and {RAY_WORKER_PORTS.stop - 1}, "
            "which Ray keeps for its own workers; choose another port"
        )
    if not is_free(port):
        raise ConfigError(f"port {port} is taken; choose another with {flag}")


def is_free(port: int) -> bool:
    """Nobody listens on this port, on loopback or on all interfaces."""
    return all(_can_bind(host, port) for host in ("127.0.0.1", "0.0.0.0"))


def _can_bind(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _free_span() -> int:
    """The first of 64 free ports in a row. Drawn, not counted up, so that clusters that start together rarely meet."""
    draw = random.SystemRandom()
    for _ in range(_DRAWS):
        first = draw.randrange(_BACKSTAGE.start, _BACKSTAGE.stop - _SPAN)
        if all(is_free(port) for port in range(first, first + _SPAN)):
            return first
    raise ConfigError(f"found no {_SPAN} free ports in a row between {_BACKSTAGE.start} and {_BACKSTAGE.stop}")
