"""Ports: a taken one is an error that names the flag, and what Serve needs behind them is found free."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kvrelay.cluster.ports import check_port, choose_ports, is_free
from kvrelay.core.errors import ConfigError


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]
    finally:
        for item in sockets:
            item.close()


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port"])
def test_a_taken_port_names_its_flag(taken: int, flag: str) -> None:
    http, grpc = free_ports(2)
    with pytest.raises(ConfigError, match=f"port {taken} is taken.*{flag}"):
        choose_ports(taken if flag == "--http-port" else http, taken if flag == "--grpc-port" else grpc, 0, 3)


def test_a_taken_metrics_port_of_any_process_counts(taken: int) -> None:
    http, grpc = free_ports(2)
    with pytest.raises(ConfigError, match="--metrics-port"):
        choose_ports(http, grpc, taken - 1, 2)


@pytest.mark.parametrize("port", [10002, 15000, 19999])
def test_rays_own_range_is_refused_with_the_reason(port: int) -> None:
    with pytest.raises(ConfigError, match=r"--http-port.*10002 and 19999.*Ray"):
        check_port("--http-port", port)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match="no port number"):
        check_port("--grpc-port", port)


def test_two_flags_cannot_share_a_port() -> None:
    (port,) = free_ports(1)
    with pytest.raises(ConfigError, match="--grpc-port and --http-port"):
        choose_ports(port, port, 0, 3)


def test_backstage_ports_are_free_distinct_and_outside_rays_range() -> None:
    http, grpc = free_ports(2)
    ports = choose_ports(http, grpc, 0, 3)
    backstage = [
        ports.haproxy_metrics,
        ports.haproxy_stats,
        ports.fallback_http,
        ports.fallback_grpc,
        *ports.replica_http,
        *ports.replica_grpc,
    ]
    assert len(set(backstage)) == len(backstage) == 64
    assert all(is_free(port) and not 10002 <= port <= 19999 for port in backstage)
