"""The router as Serve's ingress: HAProxy sends HTTP and gRPC straight to this process, no Python proxy between.

    HTTP ─▶ Serve's uvicorn in this replica ─▶ build_app(router)
    gRPC ─▶ Serve's grpc.aio server in this replica ─▶ ServeGrpc ─▶ InferenceService(router)

    __init__ ─▶ links dial, warm-up ─▶ serving ─▶ __del__: nobody new, the rest finish, stop
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette

from kvrelay.cluster.discovery import RayDirectory, RegistryWithRay
from kvrelay.cluster.replica_config import (
    application_name,
    metrics_port,
    model_directory,
    node_address,
    replica_config,
    start_logging,
)
from kvrelay.cluster.serve_grpc import ServeGrpc
from kvrelay.core.clock import SystemClock
from kvrelay.core.config import load_faults
from kvrelay.observe.metrics import RouterMetrics
from kvrelay.placement.open import open_registry
from kvrelay.router.http import build_app
from kvrelay.router.public_grpc import InferenceService
from kvrelay.router.router import Router
from kvrelay.text.tokenizer import Tokenizer


class RouterReplica(ServeGrpc):
    async def __init__(  # type: ignore[misc]  # Serve awaits an async constructor on the replica's own loop
        self, args: Mapping[str, Any], *pools: object
    ) -> None:
        """`pools` are the worker deployments: naming them here is what makes them part of the application."""
        config = replica_config(args)
        start_logging(args, f"router-{os.getpid()}")
        router = replace(config.router, host=args["host"] or node_address(), metrics_port=metrics_port(args, 0))
        config = replace(config, router=router)
        metrics = RouterMetrics()
        self._drain_s = config.worker.drain_s
        faults = load_faults(config)
        redis = open_registry(config.placement, SystemClock(), metrics, faults)
        self._registry = RegistryWithRay(redis, RayDirectory(application_name()))
        tokenizer = Tokenizer.from_directory(model_directory(args, config))
        self._router = Router(config, tokenizer, self._registry, metrics=metrics, faults=faults)
        self._open_grpc(self._router, InferenceService(self._router), loopback_only=args["loopback_only"])
        await self._router.start()

    def __serve_build_asgi_app__(self) -> Starlette:
        return build_app(self._router)

    def pid(self) -> int:
        return os.getpid()

    async def __del__(self) -> None:
        await self._router.drain(self._drain_s)
        await self._router.stop()
        await self._registry.close()
