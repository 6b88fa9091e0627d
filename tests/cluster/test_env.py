"""The environment of a local Ray: its own paths and ports, explicit authentication, HAProxy on loopback."""

from __future__ import annotations

import resource
import stat
import subprocess
from pathlib import Path

import pytest

from kvrelay.cluster import env
from kvrelay.cluster.ports import ClusterPorts

PORTS = ClusterPorts(http=8000, grpc=9000, metrics=9400, backstage=20000)


def test_authentication_is_explicit_and_its_token_private(tmp_path: Path) -> None:
    values = env.ray_environment(tmp_path, PORTS, None)
    token = Path(values["RAY_AUTH_TOKEN_PATH"])
    assert values["RAY_AUTH_MODE"] == "token"
    assert token.is_relative_to(tmp_path)
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64


def test_without_haproxy_serve_uses_its_own_proxy(tmp_path: Path) -> None:
    values = env.ray_environment(tmp_path, PORTS, None)
    assert values["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
    assert not [name for name in values if name.startswith("RAY_SERVE_HAPROXY")]


def test_two_clusters_share_no_path_and_no_port(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    other = ClusterPorts(http=8001, grpc=9001, metrics=9500, backstage=21000)
    one = env.ray_environment(tmp_path / "a", PORTS, "/bin/true")
    two = env.ray_environment(tmp_path / "b", other, "/bin/true")
    own = [name for name in one if name.endswith(("_PORT", "_PATH", "_LOC", "_BASE", "_FILE"))]
    assert len(own) >= 12
    assert not [name for name in own if one[name] == two[name]]


def test_haproxys_statistics_and_metrics_are_bound_to_loopback(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(
        "frontend prometheus\n    bind :20000\nlisten stats\n  bind *:20001\nfrontend http\n  bind 0.0.0.0:80\n"
    )
    stand_in = tmp_path / "stand-in"
    stand_in.write_text('#!/bin/sh\necho "$@"\n')
    stand_in.chmod(0o700)
    values = env.ray_environment(tmp_path, PORTS, str(stand_in))
    command = [values["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(config), "-dR"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    assert shown.split() == ["-db", "-f", str(config), "-dR"]
    assert config.read_text() == (
        "frontend prometheus\n    bind 127.0.0.1:20000\nlisten stats\n  bind 127.0.0.1:20001\n"
        "frontend http\n  bind 0.0.0.0:80\n"
    )


@pytest.mark.parametrize(("files", "connections"), [(20_000, 7_897), (1_024, 307), (10**6, 16_384), (-1, 16_384)])
def test_the_connection_limit_fits_the_open_files(
    monkeypatch: pytest.MonkeyPatch, files: int, connections: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert env.max_connections() == connections


def test_apply_forgets_the_address_of_another_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, str] = {"RAY_ADDRESS": "elsewhere:6379"}
    monkeypatch.setattr("os.environ", values)
    env.apply({"RAY_AUTH_MODE": "token"})
    assert values == {"RAY_AUTH_MODE": "token"}
