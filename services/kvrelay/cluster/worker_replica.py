"""A prefill or decode worker as a Serve replica: Ray places, watches and replaces it; no request goes through Serve.

    __init__ ─▶ WorkerProcess.start (own gRPC port, own lease) ─▶ check_health every 2 s ─▶ __del__: drain, stop

The worker is imported inside the constructor: the machine that deploys and the router image have no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvrelay.cluster.discovery import RayDirectory, keep_announced
from kvrelay.cluster.replica_config import (
    application_name,
    metrics_port,
    model_directory,
    node_address,
    replica_config,
    replica_name,
    start_logging,
)

if TYPE_CHECKING:
    from kvrelay.worker.process import WorkerProcess

_WITHDRAW_TIMEOUT_S = 2.0


class WorkerReplica:
    async def __init__(  # type: ignore[misc]  # Serve awaits an async constructor on the replica's own loop
        self, args: Mapping[str, Any], role: str, first_process: int
    ) -> None:
        from kvrelay.worker.process import WorkerProcess

        config = replica_config(args)
        worker_id = f"{role}-{replica_name()}"
        start_logging(args, worker_id)
        worker = replace(
            config.worker,
            role=role,
            worker_id=worker_id,
            host=args["host"] or node_address(),
            port=0,
            metrics_port=metrics_port(args, first_process),
        )
        self._drain_s = worker.drain_s
        self._process: WorkerProcess | None = None
        process = WorkerProcess(replace(config, worker=worker), model_directory(args, config))
        record = await process.start()
        self._process = process
        self._presence = asyncio.create_task(keep_announced(RayDirectory(application_name()), record))

    async def check_health(self) -> None:
        """Serve replaces a replica whose health check raises."""
        reason = self._process.health() if self._process is not None else "it is stopping"
        if reason:
            raise RuntimeError(reason)

    async def __del__(self) -> None:
        """Serve awaits this on scale-in, redeploy and shutdown, up to `graceful_shutdown_timeout_s`."""
        process, self._process = self._process, None
        if process is not None:
            self._presence.cancel()
            await asyncio.wait([self._presence], timeout=_WITHDRAW_TIMEOUT_S)
            await process.drain(self._drain_s)
            await process.stop()
