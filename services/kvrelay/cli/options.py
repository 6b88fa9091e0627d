"""Flags that several commands share. None: the flag was not given, and the config file or the default decides."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_REDIS = "Redis URL, redis://host:port/db; or set KVRELAY_REDIS_URL."

_CONFIG = "Settings in YAML; deploy/laptop.yaml is one. Flags win over it."
_MODEL = "A directory as Hugging Face saves it, a .gguf, a hub name; demo-gguf is the demo in 4 bits."
_WEIGHTS = "auto (as the file has them), bf16, int8 or int4."

ConfigFile = Annotated[Path | None, typer.Option("--config", help=_CONFIG)]
ModelPath = Annotated[str | None, typer.Option("--model", show_default="demo", help=_MODEL)]
ServedName = Annotated[str | None, typer.Option(show_default="last part of the path", help="Model id in the API.")]
Dtype = Annotated[str | None, typer.Option(show_default="auto", help="auto, float32, bfloat16 or float16.")]
Weights = Annotated[str | None, typer.Option(show_default="auto", help=_WEIGHTS)]
MaxContext = Annotated[int | None, typer.Option(min=1, show_default="the model's", help="Longest sequence in tokens.")]
KvMemory = Annotated[str | None, typer.Option(show_default="auto", help="KV memory per worker, such as 2GiB.")]
NumBlocks = Annotated[int | None, typer.Option(min=2, help="KV blocks per worker, instead of --kv-memory.")]
Prefill = Annotated[int | None, typer.Option(min=0, show_default="1", help="Prefill workers.")]
Decode = Annotated[int | None, typer.Option(min=1, show_default="1", help="Decode workers.")]
RedisUrl = Annotated[str | None, typer.Option(show_default="an embedded server", help=_REDIS)]
RegistryUrl = Annotated[str | None, typer.Option("--redis-url", help=f"Where workers register. {_REDIS}")]
HttpPort = Annotated[int | None, typer.Option(show_default="8000", help="HTTP port.")]
GrpcPort = Annotated[int | None, typer.Option(show_default="9000", help="gRPC port.")]
MetricsPort = Annotated[
    int | None, typer.Option(show_default="9400", help="Process i publishes metrics at this + i; 0: none.")
]
FaultRules = Annotated[
    Path | None, typer.Option("--faults", exists=True, dir_okay=False, help="Rehearse: inject faults by these rules.")
]
WhichCluster = Annotated[int | None, typer.Option("--http-port", help="Which cluster, if there are several.")]
