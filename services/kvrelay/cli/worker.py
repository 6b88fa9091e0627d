"""`kvrelay worker`: one prefill or decode worker as a plain process, without Ray.

    flags ─▶ Config ─▶ WorkerProcess.start ─▶ one line (and the ready file) ─▶ SIGTERM or SIGINT: drain, stop, exit 0
                                                                          └─▶ failed: last words, exit 70 at once
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrelay.cli import options
from kvrelay.cli.settings import check_bindable, with_faults
from kvrelay.cli.show import Bars
from kvrelay.core.config import Config, load_config
from kvrelay.core.placement import Role

if TYPE_CHECKING:
    from kvrelay.worker.process import WorkerProcess

EXIT_FAILED = 70
"""EX_SOFTWARE: the engine died or is stuck. Whoever supervises this process starts a new one."""
LAST_WORDS_S = 2.0

EXAMPLES = (
    "kvrelay worker --role prefill --redis-url redis://127.0.0.1:6379/0",
    "kvrelay worker --role decode --port 7002",
)


def command(
    role: Annotated[Role | None, typer.Option(show_default="mixed", help="Its work; mixed: both.")] = None,
    model: options.ModelPath = None,
    served_name: options.ServedName = None,
    host: Annotated[str | None, typer.Option(show_default="127.0.0.1", help="Listen on this address.")] = None,
    port: Annotated[int | None, typer.Option(min=0, show_default="a free one", help="Attach service.")] = None,
    redis_url: options.RegistryUrl = None,
    config: options.ConfigFile = None,
    kv_memory: options.KvMemory = None,
    num_blocks: options.NumBlocks = None,
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    max_context: options.MaxContext = None,
    threads: Annotated[int | None, typer.Option(min=0, show_default="a fair share", help="Compute threads.")] = None,
    metrics_port: Annotated[int | None, typer.Option(min=0, show_default="none", help="Publish /metrics here.")] = None,
    drain_s: Annotated[float | None, typer.Option(min=0, help="How long running sequences may go on.")] = None,
    worker_id: Annotated[str | None, typer.Option("--id", show_default="role and random word", help="Its name")] = None,
    ready_file: Annotated[Path | None, typer.Option(help="Write the worker's record here as JSON once ready.")] = None,
    faults: options.FaultRules = None,
) -> None:
    """Run one worker until it is told to stop. Routers find it in Redis, or are given its address (--workers)."""
    settings = load_config(config)
    settings = replace(
        settings,
        model=_over(
            settings.model, path=model, served_name=served_name, dtype=dtype, weights=weights, max_context=max_context
        ),
        engine=_over(settings.engine, kv_memory=kv_memory, num_blocks=num_blocks),
        placement=_over(settings.placement, redis_url=redis_url),
        worker=_over(
            settings.worker, role=role and role.value, worker_id=worker_id, host=host, port=port,
            metrics_port=metrics_port, threads=threads, drain_s=drain_s,
        ),
        faults=with_faults(settings.faults, faults),
    )  # fmt: skip
    _run(settings, ready_file)


def _run(config: Config, ready_file: Path | None) -> None:
    """The heavy imports begin here: `kvrelay worker --help` needs none of them."""
    import asyncio
    import os

    from kvrelay.model.obtain import obtain
    from kvrelay.observe.logs import setup_logging
    from kvrelay.worker.process import WorkerProcess

    for flag, port in (("--port", config.worker.port), ("--metrics-port", config.worker.metrics_port)):
        check_bindable(flag, config.worker.host, port)
    setup_logging()
    directory = obtain(config.model.path, Bars())
    failed = asyncio.run(_serve(WorkerProcess(config, directory, progress=Bars()), config, ready_file))
    if failed:
        # Not sys.exit: the engine thread may be stuck in a step, and its memory has to go with it.
        os._exit(EXIT_FAILED)


async def _serve(process: WorkerProcess, config: Config, ready_file: Path | None) -> bool:
    """Until told to stop (False) or failed (True)."""
    import asyncio
    import signal

    await process.start()
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):  # until here they end the process at once: nobody depends on it
        loop.add_signal_handler(number, stopped.set)
    _announce(process, ready_file)
    waits = [asyncio.create_task(process.wait()), asyncio.create_task(stopped.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if not process.health():
        await process.drain(config.worker.drain_s)
        await process.stop()
        return False
    typer.echo(f"worker failed: {process.health()}", err=True)
    await process.close_streams(LAST_WORDS_S)
    return True


def _announce(process: WorkerProcess, ready_file: Path | None) -> None:
    import json
    from dataclasses import asdict

    record = process.record
    if ready_file is not None:
        fresh = ready_file.with_name(f"{ready_file.name}.new")
        fresh.write_text(json.dumps(asdict(record) | {"role": record.role.value}))
        fresh.replace(ready_file)
    typer.echo(
        f"worker {record.worker_id} ready role={record.role.value} attach={record.address} push={record.push_address}  "
        f"{process.model.capacity}"
    )


def _over(settings: Any, **flags: Any) -> Any:
    """Flags that were given win."""
    return replace(settings, **{name: value for name, value in flags.items() if value is not None})

