"""From flags to the one frozen `Config`: flags win over the environment, the environment over the file."""

from __future__ import annotations

import socket
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import typer

from kvrelay.core.config import Config, FaultSettings, load_config, read_faults
from kvrelay.core.errors import ConfigError

DEFAULT_METRICS_PORT = 9400
Settings = TypeVar("Settings")


def cluster_config(
    path: Path | None,
    *,
    model: str | None = None,
    served_name: str | None = None,
    dtype: str | None = None,
    weights: str | None = None,
    max_context: int | None = None,
    kv_memory: str | None = None,
    num_blocks: int | None = None,
    prefill: int | None = None,
    decode: int | None = None,
    redis_url: str | None = None,
    http_port: int | None = None,
    grpc_port: int | None = None,
    metrics_port: int | None = None,
    faults: Path | None = None,
) -> Config:
    """The file, then `KVRELAY_REDIS_URL`, then every flag that was given (None: it was not). Raises ConfigError."""
    config = load_config(path)
    if metrics_port is None:
        metrics_port = config.router.metrics_port or DEFAULT_METRICS_PORT
    return replace(
        config,
        model=_over(
            config.model, path=model, served_name=served_name, dtype=dtype, weights=weights, max_context=max_context
        ),
        engine=_over(config.engine, kv_memory=kv_memory, num_blocks=num_blocks),
        cluster=_over(config.cluster, prefill=prefill, decode=decode),
        placement=_over(config.placement, redis_url=redis_url),
        router=_over(config.router, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port),
        faults=with_faults(config.faults, faults),
    )


def with_faults(settings: FaultSettings, rules: Path | None) -> FaultSettings:
    """The path is absolute, because the processes that read it run elsewhere. Says loudly what was asked for."""
    if rules is not None:
        settings = FaultSettings(str(rules.resolve()))
    if settings.rules:
        parsed = read_faults(settings.rules)
        typer.secho(f"FAULTS ON PURPOSE ({settings.rules}):", fg="red", bold=True, err=True)
        for rule in parsed:
            typer.secho(f"  {rule}", fg="red", err=True)
    return settings


def why_no_redis(settings: Config) -> str:
    """Empty if the configured server answers."""
    import asyncio

    from kvrelay.placement.open import shown, why_no_redis

    reason = asyncio.run(why_no_redis(settings.placement))
    return f"Redis at {shown(settings.placement.redis_url)} does not answer: {reason}" if reason else ""


def check_bindable(flag: str, host: str, port: int) -> None:
    """A taken port should not cost the loading of a model. Raises ConfigError; 0 is always free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose with {flag}") from error


def _over(settings: Settings, **flags: Any) -> Settings:
    known = {item.name for item in fields(settings)}  # type: ignore[arg-type]  # every Settings is a dataclass
    assert known >= flags.keys()
    return replace(settings, **{name: value for name, value in flags.items() if value is not None})  # type: ignore[type-var]
