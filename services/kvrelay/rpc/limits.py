"""Channel arguments of both ends, in one place so that they agree.

A link between our own processes pings every second, also without calls, and notices a partition in about three.
A server answers a client that pings more often than it allows with `too_many_pings` and hangs up; so the internal
server allows what the internal channel does. Message sizes are always explicit: gRPC's default of 4 MiB is too
small for a long prompt with logprobs, and "unlimited" lets one message take all the memory there is.
"""

from __future__ import annotations

MIB = 1 << 20
MAX_INTERNAL_MESSAGE_BYTES = 32 * MIB
MAX_PUBLIC_MESSAGE_BYTES = 8 * MIB
KEEPALIVE_MS = 1_000
KEEPALIVE_TIMEOUT_MS = 2_000
MAX_RECONNECT_BACKOFF_MS = 1_000
PUBLIC_KEEPALIVE_MS = 20_000
PUBLIC_MIN_PING_INTERVAL_MS = 5_000

Options = tuple[tuple[str, int | str], ...]


def channel_options(*, public: bool = False, max_message_bytes: int = 0) -> Options:
    """Arguments for a channel; `public`: towards a front door, through proxies. Works for sync and aio channels."""
    keepalive_ms = PUBLIC_KEEPALIVE_MS if public else KEEPALIVE_MS
    options: Options = (
        *_sizes(public, max_message_bytes),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS if not public else 10_000),
        ("grpc.keepalive_permit_without_calls", 0 if public else 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
        # A connection of its own: a Push must not queue behind, or die with, somebody else's stream.
        ("grpc.use_local_subchannel_pool", 1),
    )
    if not public:
        options += (("grpc.enable_http_proxy", 0),)
    return options


def server_options(*, public: bool = False, max_message_bytes: int = 0) -> Options:
    return (
        *_sizes(public, max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", PUBLIC_KEEPALIVE_MS if public else KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", 10_000 if public else KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        (
            "grpc.http2.min_recv_ping_interval_without_data_ms",
            PUBLIC_MIN_PING_INTERVAL_MS if public else KEEPALIVE_MS // 4,
        ),
        ("grpc.http2.max_ping_strikes", 3 if public else 0),
    )


def _sizes(public: bool, max_message_bytes: int) -> Options:
    size = max_message_bytes or (MAX_PUBLIC_MESSAGE_BYTES if public else MAX_INTERNAL_MESSAGE_BYTES)
    if size < 0:
        raise ValueError("a message limit is a number of bytes, never unlimited")
    return (("grpc.max_send_message_length", size), ("grpc.max_receive_message_length", size))
