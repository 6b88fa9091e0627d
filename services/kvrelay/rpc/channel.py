"""Channels. The caller owns the channel and closes it; it belongs to the event loop it was opened on."""

from __future__ import annotations

import grpc

from kvrelay.rpc.limits import channel_options
from kvrelay.rpc.tls import Tls


def open_channel(
    address: str, *, public: bool = False, max_message_bytes: int = 0, tls: Tls | None = None
) -> grpc.aio.Channel:
    """A channel to host:port. Connects on first use; `public`: to a front door, keepalive as proxies like it.

    With `tls`, whoever answers must be of the cluster; the certificates are the ones on disk now.
    """
    options = channel_options(public=public, max_message_bytes=max_message_bytes)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    named = (("grpc.ssl_target_name_override", tls.name),)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options + named)
