"""Health and reflection for the public server, as standard gRPC tools expect them."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection


class Health:
    """The health service of one server: the whole server (`""`) and each named service have the same state."""

    def __init__(self, server: grpc.aio.Server, service_names: Sequence[str]) -> None:
        """`service_names` are full names, such as `kvrelay.v1.Inference`. Starts as not serving."""
        self._names = ("", *service_names)
        self._servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._servicer.set(name, status)
