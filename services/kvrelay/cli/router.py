"""`kvrelay router`: one router as a plain process, without Ray and without torch.

    flags ─▶ Config ─▶ ports ─▶ Router.start, HTTP and gRPC on one loop ─▶ one line (and the ready file)
                                   └─ SIGTERM or SIGINT: /readyz says 503, streams finish (at most --drain-s), exit 0
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrelay.cli import options
from kvrelay.cli.settings import check_bindable, with_faults
from kvrelay.cli.show import Bars
from kvrelay.core.config import Config, load_config
from kvrelay.core.errors import ConfigError

if TYPE_CHECKING:
    import socket

    from kvrelay.router.router import Router

HANG_UP_S = 2.0
"""What connections get to be closed after the drain."""

BACKLOG = 2048

EXAMPLES = (
    "kvrelay router --redis-url redis://127.0.0.1:6379/0",
    "kvrelay router --workers 127.0.0.1:7001,127.0.0.1:7002",
)


def command(
    model: options.ModelPath = None,
    served_name: options.ServedName = None,
    workers: Annotated[str, typer.Option(help="Attach addresses of workers, host:port,host:port; beside Redis.")] = "",
    redis_url: options.RegistryUrl = None,
    host: Annotated[str | None, typer.Option(show_default="127.0.0.1", help="Listen on this address.")] = None,
    http_port: Annotated[int | None, typer.Option(show_default="8000", help="HTTP port; 0: a free one.")] = None,
    grpc_port: Annotated[int | None, typer.Option(show_default="9000", help="gRPC port; 0: a free one.")] = None,
    metrics_port: Annotated[int | None, typer.Option(show_default="none", help="Publish /metrics here.")] = None,
    config: options.ConfigFile = None,
    drain_s: Annotated[float, typer.Option(help="How long running streams may go on at the end.")] = 30.0,
    ready_file: Annotated[Path | None, typer.Option(help="Write the ports here as JSON once they listen.")] = None,
    faults: options.FaultRules = None,
) -> None:
    """Run one router until it is told to stop: the HTTP and gRPC API in front of workers that run already."""
    settings = load_config(config)
    settings = replace(
        settings,
        model=_over(settings.model, path=model, served_name=served_name),
        placement=_over(settings.placement, redis_url=redis_url),
        router=_over(
            settings.router, host=host, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port
        ),
        faults=with_faults(settings.faults, faults),
    )
    addresses = tuple(each.strip() for each in workers.split(",") if each.strip())
    if not addresses and not settings.placement.redis_url:
        raise ConfigError("where are the workers? Give --workers, or the --redis-url where they register")
    _run(settings, addresses, drain_s, ready_file)


def _run(config: Config, workers: tuple[str, ...], drain_s: float, ready_file: Path | None) -> None:
    """The heavier imports begin here: `kvrelay router --help` needs none of them."""
    import asyncio

    import uvloop

    from kvrelay.observe.logs import setup_logging

    setup_logging()
    directory = _directory(config.model.path)
    if config.model.path == "demo":  # known by its own name, as workers know it
        config = replace(config, model=replace(config.model, path=str(directory)))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, directory, workers, drain_s, ready_file))


def _directory(path: str) -> Path:
    """A local directory is used as it is; only a model that must be fetched needs the model package."""
    if (Path(path) / "tokenizer.json").is_file():
        return Path(path)
    from kvrelay.model.obtain import obtain

    return obtain(path, Bars())


async def _serve(
    config: Config, directory: Path, workers: tuple[str, ...], drain_s: float, ready_file: Path | None
) -> None:
    import asyncio
    import signal

    from kvrelay.core.clock import SystemClock
    from kvrelay.core.config import load_faults
    from kvrelay.observe.metrics import RouterMetrics
    from kvrelay.placement.open import open_registry
    from kvrelay.router.router import Router
    from kvrelay.text.tokenizer import Tokenizer

    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    listener = _listen(config.router.host, config.router.http_port)
    check_bindable("--grpc-port", config.router.host, config.router.grpc_port)
    metrics = RouterMetrics()
    faults = load_faults(config)
    registry = open_registry(config.placement, SystemClock(), metrics, faults)
    tokenizer = Tokenizer.from_directory(directory)
    router = Router(config, tokenizer, registry, static_workers=workers, metrics=metrics, faults=faults)
    try:
        await router.start()
        await _open_doors(router, listener, stopped, drain_s, ready_file)
    finally:
        listener.close()
        await router.stop()
        await registry.close()


async def _open_doors(
    router: Router, listener: socket.socket, stopped: Any, drain_s: float, ready_file: Path | None
) -> None:
    import asyncio

    from kvrelay.router.public_server import PublicServer

    settings = router.settings
    grpc_server = PublicServer(router)
    grpc_port = await grpc_server.start(settings.host, settings.grpc_port)
    http_server = _http_server(router)
    serving = asyncio.create_task(http_server.serve(sockets=[listener]))
    _announce(settings.host, listener.getsockname()[1], grpc_port, ready_file)
    try:
        stopping = asyncio.create_task(stopped.wait())
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await router.drain(drain_s)
    finally:
        http_server.should_exit = True
        await grpc_server.stop(HANG_UP_S)
        await serving


def _http_server(router: Router) -> Any:
    import uvicorn

    from kvrelay.router.http import build_app

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Signals are this module's: they drain the router before a connection is closed."""
            yield

    config = uvicorn.Config(
        build_app(router), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=int(HANG_UP_S),
        server_header=False,
    )
    return Server(config)


def _listen(host: str, port: int) -> socket.socket:
    """Raises ConfigError that names the flag if the port is taken."""
    import socket

    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"HTTP port {host}:{port}: {error.strerror}; choose with --http-port") from error
    return listener


def _announce(host: str, http_port: int, grpc_port: int, ready_file: Path | None) -> None:
    import json
    import os

    typer.echo(f"router listens on http://{host}:{http_port} grpc={host}:{grpc_port}")
    if ready_file is not None:
        fresh = ready_file.with_name(f"{ready_file.name}.new")
        fresh.write_text(
            json.dumps({"http": f"http://{host}:{http_port}", "grpc": f"{host}:{grpc_port}", "pid": os.getpid()})
        )
        fresh.replace(ready_file)


def _over(settings: Any, **flags: Any) -> Any:
    """Flags that were given win."""
    return replace(settings, **{name: value for name, value in flags.items() if value is not None})

