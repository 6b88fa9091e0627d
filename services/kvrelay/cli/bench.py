"""`kvrelay bench`: measurements, each a human table, or one JSON document with `--json`. Needs `kvrelay[bench]`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrelay.core.errors import ConfigError

app = typer.Typer(help="Measure the engine, a server under load, and the peers beside them.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Model = Annotated[str, typer.Option(help="A model directory, a hub name, or demo.")]
Threads = Annotated[int, typer.Option(min=0, show_default="all cores", help="Compute threads.")]


@app.command("engine")
def engine(
    model: Model = "demo",
    weights: Annotated[str, typer.Option(help="Formats to measure, such as bf16,int8,int4.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    batches: Annotated[str, typer.Option(help="Sequences per step.")] = "1,8,32",
    contexts: Annotated[str, typer.Option(help="Tokens of context per sequence.")] = "128,1024,4096",
    prefill: Annotated[str, typer.Option(help="Prompt lengths.")] = "128,512,2048",
    steps: Annotated[int, typer.Option(min=8, max=4096, help="Timed decode steps per row.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Of each prefill.")] = 5,
    threads: Threads = 0,
    kv_memory: Annotated[str, typer.Option(help="Rows that need more KV are left out.")] = "6GiB",
    cell_s: Annotated[float, typer.Option(min=0.1, max=600, help="Longest time for a decode row.")] = 20.0,
    as_json: AsJson = False,
) -> None:
    """Decode step and prefill of our engine alone: scheduler and sampling included, no network."""
    _require("torch")
    from kvrelay_loadtest.engine_bench import EngineBench, print_engine_bench, run_engine_bench
    from kvrelay_loadtest.show import Bars, print_json

    bench = EngineBench(
        model, tuple(weights.split(",")), dtype, _numbers(batches), _numbers(contexts), _numbers(prefill), steps,
        repeats, threads, kv_memory, cell_s,
    )  # fmt: skip
    document = run_engine_bench(bench, Bars())
    print_json(document) if as_json else print_engine_bench(document)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"expected numbers such as 1,8,32, found {text!r}") from None
    if not all(0 < number <= 1 << 20 for number in numbers):
        raise ConfigError(f"numbers from 1 to {1 << 20} make sense here, found {text}")
    return numbers


def _require(*modules: str) -> None:
    """Raises ConfigError that names the extra."""
    from importlib.util import find_spec

    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ConfigError(f"this needs {', '.join(missing)}: pip install 'kvrelay[bench]'")
