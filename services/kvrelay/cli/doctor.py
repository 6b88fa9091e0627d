"""`kvrelay doctor`: can this machine run a cluster? One line per check, exit code 1 if one fails."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import typer

from kvrelay.cli import options
from kvrelay.cli.settings import cluster_config, why_no_redis
from kvrelay.cli.show import console, say
from kvrelay.core.config import Config
from kvrelay.core.errors import ConfigError

PACKAGES = ("grpcio", "protobuf", "torch", "transformers", "ray", "starlette", "tokenizers", "redis")
MIN_MEMORY_GIB = 4.0
MIN_OPEN_FILES = 4096


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    level: str
    """ok, warning or failed."""
    text: str

EXAMPLES: tuple[str, ...] = ()


def command(config: options.ConfigFile = None) -> None:
    """Check Python, packages, processor, memory, ports, Redis, HAProxy and certificates."""
    settings = cluster_config(config)
    findings = [finding for check in CHECKS for finding in check(settings)]
    _print(findings)
    if any(finding.level == "failed" for finding in findings):
        raise typer.Exit(1)


def check_python(_: Config) -> list[Finding]:
    level = "ok" if sys.version_info >= (3, 11) else "failed"
    return [Finding("python", level, f"{platform.python_version()} (3.11 or newer is needed)")]


def check_packages(_: Config) -> list[Finding]:
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return [Finding("packages", "failed", f"missing: {', '.join(missing)}; pip install 'kvrelay[all]'")]
    return [Finding("packages", "ok", ", ".join(found))]


def check_processor(_: Config) -> list[Finding]:
    import psutil

    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    try:
        import torch
    except ImportError:
        return [Finding("processor", "failed", "torch cannot be imported")]
    if torch.cuda.is_available():
        return [Finding("processor", "ok", f"{torch.cuda.device_count()} GPU(s): {torch.cuda.get_device_name(0)}")]
    bf16 = bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    text = f"{cores} cores, bfloat16 {'native' if bf16 else 'emulated: float32 will be used'}"
    return [Finding("processor", "ok" if bf16 else "warning", text)]


def check_memory(_: Config) -> list[Finding]:
    import psutil

    free = psutil.virtual_memory().available / (1 << 30)
    level = "ok" if free >= MIN_MEMORY_GIB else "warning"
    return [Finding("memory", level, f"{free:.1f} GiB available ({MIN_MEMORY_GIB:.0f} GiB for one of each worker)")]


def check_files(_: Config) -> list[Finding]:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few = limit != resource.RLIM_INFINITY and limit < MIN_OPEN_FILES
    return [Finding("open files", "warning" if few else "ok", f"limit {limit}")]


def check_ports(settings: Config) -> list[Finding]:
    from kvrelay.cluster.ports import check_port

    router = settings.router
    findings = []
    for flag, port in (
        ("--http-port", router.http_port), ("--grpc-port", router.grpc_port), ("--metrics-port", router.metrics_port),
    ):  # fmt: skip
        try:
            check_port(flag, port)
            findings.append(Finding("port", "ok", f"{port} is free ({flag})"))
        except ConfigError as error:
            findings.append(Finding("port", "failed", str(error)))
    return findings


def check_redis(settings: Config) -> list[Finding]:
    if settings.placement.redis_url:
        reason = why_no_redis(settings)
        return [Finding("redis", "failed" if reason else "ok", reason or "the configured server answers")]
    from kvrelay.placement.embedded import find_server

    try:
        return [Finding("redis", "ok", f"embedded: {find_server().name}")]
    except ConfigError as error:
        return [Finding("redis", "failed", str(error))]


def check_haproxy(_: Config) -> list[Finding]:
    from kvrelay.cluster.env import find_haproxy

    if find_haproxy() is None:
        return [Finding("haproxy", "warning", "none for this machine: Ray Serve's own, slower proxy is used")]
    return [Finding("haproxy", "ok", "found")]


def check_security(settings: Config) -> list[Finding]:
    from kvrelay.rpc.tls import open_tls

    try:
        tls = open_tls(settings.security)
    except ConfigError as error:
        return [Finding("security", "failed", str(error))]
    if tls is None:
        return [Finding("security", "ok", "plain text between processes; for TLS set ca, certificate and key")]
    return [Finding("security", "ok", f"the certificate is of the cluster and names {tls.name}")]


CHECKS: tuple[Callable[[Config], list[Finding]], ...] = (
    check_python, check_packages, check_processor, check_memory, check_files, check_ports, check_redis, check_haproxy,
    check_security,
)  # fmt: skip


def _print(findings: list[Finding]) -> None:
    from rich.table import Table

    colours = {"ok": "green", "warning": "yellow", "failed": "red"}
    table = Table("check", "", "finding", box=None)
    for finding in findings:
        table.add_row(finding.name, f"[{colours[finding.level]}]{finding.level}[/]", finding.text)
    console.print(table)
    if all(finding.level != "failed" for finding in findings):
        say("This machine can run: kvrelay up")
