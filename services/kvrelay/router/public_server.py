"""The public gRPC server of a plain router process: the API, health and reflection on one port."""

from __future__ import annotations

import asyncio

import grpc

from kvrelay.core.errors import ConfigError
from kvrelay.router.front import FrontDoor
from kvrelay.router.public_grpc import SERVICE_NAME, InferenceService
from kvrelay.rpc.health import Health
from kvrelay.rpc.server import bind, new_server

HEALTH_S = 0.5
"""How often the health service looks at the front door's readiness."""


class PublicServer:
    """`await start()` → port; `await stop(grace_s)`."""

    def __init__(self, front: FrontDoor) -> None:
        self._front = front
        self._server: grpc.aio.Server = new_server(public=True, max_message_bytes=front.settings.max_body_bytes)
        InferenceService(front).add_to_server(self._server)
        self._health = Health(self._server, (SERVICE_NAME,))
        self._watch: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Raises ConfigError that names the flag if the port is taken."""
        try:
            bound = bind(self._server, host, port)
        except OSError as error:
            raise ConfigError(f"gRPC port {host}:{port}: {error}; choose with --grpc-port") from error
        await self._server.start()
        self._watch = asyncio.get_running_loop().create_task(self._watch_readiness(), name="gRPC health")
        return bound

    async def stop(self, grace_s: float) -> None:
        """New calls are refused at once; those under way get `grace_s`."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._server.stop(grace_s)

    async def _watch_readiness(self) -> None:
        while True:
            await self._health.set_serving(self._front.readiness().ready)
            await asyncio.sleep(HEALTH_S)
