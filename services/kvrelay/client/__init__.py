"""The client SDK: needs grpcio and protobuf, nothing else.

    from kvrelay.client import Client, Delta

    with Client("127.0.0.1:9000") as client:
        for event in client.chat([{"role": "user", "content": "Name the capital of Japan."}]):
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)

`AsyncClient` is the same for asyncio. Leaving the iterator cancels the request on the server. Calls that fail before
the first token are retried; a stream that breaks later goes on where it was. `examples/` has complete programs.
"""

from __future__ import annotations

from kvrelay.client.async_client import AsyncClient, AsyncStream
from kvrelay.client.events import Delta, Event, Finished, ModelInfo, Started, Summary
from kvrelay.client.options import ChatMessage, Options, RetryPolicy, Tls
from kvrelay.client.sync_client import Client, Stream
from kvrelay.core.errors import (
    BadRequest,
    Broken,
    DeadlineExceeded,
    KvrelayError,
    NoRoom,
    Overloaded,
    QuotaExceeded,
    Rejected,
    TooLarge,
    Unauthorised,
    Unavailable,
    UnknownModel,
)

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "BadRequest",
    "Broken",
    "ChatMessage",
    "Client",
    "DeadlineExceeded",
    "Delta",
    "Event",
    "Finished",
    "KvrelayError",
    "ModelInfo",
    "NoRoom",
    "Options",
    "Overloaded",
    "QuotaExceeded",
    "Rejected",
    "RetryPolicy",
    "Started",
    "Stream",
    "Summary",
    "Tls",
    "TooLarge",
    "Unauthorised",
    "Unavailable",
    "UnknownModel",
]
