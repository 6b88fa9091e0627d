"""Every setting of every component, in one place; the only module of `core` that reads files or the environment.

One YAML file (`--config kvrelay.yaml`) has a section per component, named as the fields of `Config`.
`KVRELAY_*` variables carry endpoints and secrets only. Flags win over the environment, the environment over the file.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from kvrelay.core.errors import ConfigError
from kvrelay.core.faults import FaultRule, Faults, parse_rules

log = logging.getLogger(__name__)

DEFAULT_DEADLINE_S = 600.0
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ModelSettings:
    path: str = "demo"
    """A directory, a .gguf, a hub name, "demo" (SmolLM2-135M-Instruct, fetched once) or "demo-gguf" (in 4 bits)."""
    served_name: str = ""
    """Default: the last part of the path."""
    dtype: str = "auto"
    """auto | float32 | bfloat16 | float16. auto: bfloat16 where the processor multiplies it natively, else float32."""
    weights: str = "auto"
    """auto | bf16 | int8 | int4. auto: as the file has them, so a GGUF is served from its own tensors."""
    numerics: str = "auto"
    """auto | exact | fast. exact: a request's bits do not depend on batch, chunks, placement, transfer or replay, and
    only workers that compute alike hand over to each other. auto: exact where the kernels can, which costs nothing."""
    max_context: int = 0
    """Tokens; 0: the model's own limit."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    block_size: int = 16
    """Tokens per KV block."""
    kv_memory: str = "auto"
    """Bytes with an optional KiB/MiB/GiB suffix; auto: 1 GiB on CPU, 0.9 of what is free on a GPU."""
    num_blocks: int = 0
    """Overrides `kv_memory` when set."""
    max_batch_tokens: int = 512
    """Tokens computed in one step, over all sequences."""
    max_num_seqs: int = 64
    """Sequences in one step."""
    max_waiting: int = 256
    """Queue bound; more is refused."""
    growth_tokens: int = 64
    """Output tokens per choice for which blocks are reserved up front."""
    watermark_fraction: float = 0.02
    """Share of the pool that new admissions leave free, so that running streams and replays can grow."""
    max_step_ms: int = 120_000
    """A step that takes longer is a stuck engine: its streams fail and the process exits."""


@dataclass(frozen=True, slots=True)
class TransferSettings:
    stall_s: float = 5.0
    """An open Push without slab or heartbeat for this long is ended."""
    heartbeat_s: float = 1.0
    max_open: int = 256
    """Reservations open at once."""
    max_open_per_router: int = 128
    """Of one router, so that none takes all of a worker. More get `Refused(no_room)`; replays are never refused."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    beat_s: float = 0.25
    silence_s: float = 2.0
    """An Attach stream that says nothing for this long is ended."""
    max_outbox_bytes: int = 8 << 20


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    role: str = "mixed"
    worker_id: str = ""
    """Default: role and a random word."""
    host: str = "127.0.0.1"
    port: int = 0
    """Attach service; 0 picks a free one."""
    metrics_port: int = 0
    """0: none."""
    threads: int = 0
    """Compute threads; 0: the cores of the machine shared fairly among local workers."""
    drain_s: float = 30.0


@dataclass(frozen=True, slots=True)
class RouterSettings:
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 9000
    metrics_port: int = 0
    deadline_s: float = DEFAULT_DEADLINE_S
    max_attempts: int = 5
    max_inflight: int = 512
    """Requests under way in this router; more get 429."""
    max_waiting_s: float = 30.0
    """How long a new request may wait for room before it is refused."""
    max_body_bytes: int = 8 << 20
    max_prompts: int = 64
    """Prompts in one completions call."""
    max_choices: int = 16
    max_delta_queue: int = 4096
    """Outputs buffered for one slow reader before its request is cancelled."""
    write_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    redis_url: str = ""
    """Empty: in memory, this router alone."""
    namespace: str = "default"
    lease_s: float = 15.0
    renew_s: float = 5.0
    call_timeout_s: float = 0.5
    session_ttl_s: float = 3600.0
    always_relay: bool = False
    """True: decode workers compute prompts themselves only when no prefill worker is left, not where it is faster."""
    local_below_tokens: int = 0
    """Uncached prompts shorter than this stay on the decode worker."""


@dataclass(frozen=True, slots=True)
class SecuritySettings:
    """TLS between routers and workers and between workers; without the three files, plain text."""

    ca: str = ""
    """PEM file: the authority whose certificates belong to the cluster; one that signs for this cluster alone."""
    certificate: str = ""
    """PEM file, the chain of this process. Good for both ends of a connection."""
    key: str = ""
    """PEM file, not encrypted."""
    name: str = "kvrelay"
    """DNS name in every certificate of the cluster; addresses need not be, since processes move."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    prefill: int = 1
    decode: int = 1
    routers: int = 1


@dataclass(frozen=True, slots=True)
class FaultSettings:
    rules: str = ""
    """A file of fault rules for a rehearsal; see `core/faults.py`. Empty: none, and nobody looks for any."""


@dataclass(frozen=True, slots=True)
class Config:
    model: ModelSettings = field(default_factory=ModelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    transfer: TransferSettings = field(default_factory=TransferSettings)
    link: LinkSettings = field(default_factory=LinkSettings)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    placement: PlacementSettings = field(default_factory=PlacementSettings)
    security: SecuritySettings = field(default_factory=SecuritySettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    faults: FaultSettings = field(default_factory=FaultSettings)


def load_config(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Defaults, then the file, then `KVRELAY_REDIS_URL`. Raises ConfigError with the way out."""
    config = Config() if path is None else config_from_dict(_sections(path))
    redis_url = (os.environ if environ is None else environ).get("KVRELAY_REDIS_URL", "")
    if redis_url:
        config = replace(config, placement=replace(config.placement, redis_url=redis_url))
    return config


def load_faults(config: Config) -> Faults | None:
    """None unless a file of rules was named; then every process says so, loudly. Raises ConfigError."""
    path = config.faults.rules
    if not path:
        return None
    rules = read_faults(path)
    log.warning("FAULTS ARE INJECTED ON PURPOSE (%s): %s", path, "; ".join(map(str, rules)))
    return Faults(rules)


def read_faults(path: str) -> list[FaultRule]:
    """Raises ConfigError that names the rule and the way out."""
    return parse_rules(_read_yaml(Path(path)), path)


def _sections(path: Path) -> dict[str, Any]:
    data = _read_yaml(path)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected sections such as `router:`, found {type(data).__name__}")
    return data


def _read_yaml(path: Path) -> Any:
    import yaml  # the SDK imports `core` without it

    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error


def config_from_dict(data: Mapping[str, Any]) -> Config:
    """The reverse of `config_to_dict`; unknown keys are errors that name the nearest known one."""
    config: Config = _build(Config, data, "")
    return config


def config_to_dict(config: Config) -> dict[str, Any]:
    return {
        section.name: {item.name: getattr(getattr(config, section.name), item.name) for item in fields(value)}
        for section in fields(config)
        if is_dataclass(value := getattr(config, section.name))
    }


def _build(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where.rstrip('.') or 'config'}: expected a mapping, found {data!r}")
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name not in hints:
            close = difflib.get_close_matches(str(name), hints, n=1)
            hint = f"; did you mean `{where}{close[0]}`?" if close else f"; known: {', '.join(hints)}"
            raise ConfigError(f"unknown setting `{where}{name}`{hint}")
        values[name] = _build(hints[name], value, f"{where}{name}.") if is_dataclass(hints[name]) else _scalar(
            hints[name], value, f"{where}{name}"
        )
    return kind(**values)


def _scalar(kind: type, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"`{where}` must be {kind.__name__}, found {value!r}")
    return value


_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kib": 1 << 10, "m": 1 << 20, "mib": 1 << 20, "g": GIB, "gib": GIB}


def parse_bytes(text: str) -> int:
    """`"1GiB"` → 1073741824. Raises ConfigError."""
    number = text.strip().lower().rstrip("kmgib ")
    unit = text.strip().lower()[len(number) :].strip()
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError):
        raise ConfigError(f"cannot read {text!r} as a size; write for example 512MiB or 2GiB") from None
