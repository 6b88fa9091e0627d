"""Channels. The caller owns the channel and closes it; it belongs to the event loop it was opened on."""

from __future__ import annotations

import grpc

from kvrelay.rpc.limits import channel_options


def open_channel(address: str, *, public: bool = False, max_message_bytes: int = 0) -> grpc.aio.Channel:
    """A channel to host:port. Connects on first use; `public`: to a front door, keepalive as proxies like it."""
    options = channel_options(public=public, max_message_bytes=max_message_bytes)
    return grpc.aio.insecure_channel(address, options=options)
