"""Servers whose options agree with `open_channel`. The caller adds services and a port, starts and stops it."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from kvrelay.rpc.interceptor import ErrorInterceptor
from kvrelay.rpc.limits import server_options
from kvrelay.rpc.tls import Tls


def new_server(
    *,
    public: bool = False,
    max_message_bytes: int = 0,
    max_concurrent_calls: int | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> grpc.aio.Server:
    """An aio server of the running loop that turns KvrelayErrors into statuses (innermost, behind `interceptors`)."""
    return grpc.aio.server(
        interceptors=(*interceptors, ErrorInterceptor()),
        options=server_options(public=public, max_message_bytes=max_message_bytes),
        maximum_concurrent_rpcs=max_concurrent_calls,
    )


def bind(server: grpc.aio.Server, host: str, port: int, tls: Tls | None = None) -> int:
    """Listen on host:port, with `tls` for the cluster alone; 0 picks a free port.

    Returns the port, raises OSError if it is taken.
    """
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if tls is None:
            bound: int = server.add_insecure_port(where)
        else:
            bound = server.add_secure_port(where, tls.server_credentials())
    except RuntimeError as error:
        raise OSError(f"cannot listen on {where}: {error}") from error
    if bound == 0:
        raise OSError(f"cannot listen on {where}")
    return bound
