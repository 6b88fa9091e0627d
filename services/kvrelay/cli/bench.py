"""`kvrelay bench`: measurements, each a human table, or one JSON document with `--json`. Needs `kvrelay[bench]`."""

from __future__ import annotations

from pathlib import Path
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
    timeline: Annotated[bool, typer.Option("--timeline", help="Also the phases of one step.")] = False,
    as_json: AsJson = False,
) -> None:
    """Decode step and prefill of our engine alone: scheduler and sampling included, no network."""
    _require("torch")
    from kvrelay_loadtest.engine_bench import EngineBench, print_engine_bench, run_engine_bench
    from kvrelay_loadtest.show import Bars, print_json

    bench = EngineBench(
        model, tuple(weights.split(",")), dtype, _numbers(batches), _numbers(contexts), _numbers(prefill), steps,
        repeats, threads, kv_memory, cell_s, timeline,
    )  # fmt: skip
    document = run_engine_bench(bench, Bars())
    print_json(document) if as_json else print_engine_bench(document)


@app.command("peers")
def peers(
    batches: Annotated[str, typer.Option(help="Sequences per decode step.")] = "1,8,32",
    prompt: Annotated[int, typer.Option(min=1, max=384, help="Prompt tokens of decode rows.")] = 128,
    tokens: Annotated[int, typer.Option(min=16, max=256, help="Output tokens of decode rows.")] = 128,
    prefill: Annotated[str, typer.Option(help="Prompt lengths.")] = "512",
    rounds: Annotated[int, typer.Option(min=1, max=50, help="Each engine's turns per row.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads of every engine.")] = 2,
    model: Model = "demo",
    gguf: Annotated[str, typer.Option(show_default="the demo's", help="GGUF for the peers that read one.")] = "",
    only: Annotated[str, typer.Option(help="These peers, with commas.", show_default="all")] = "",
    as_json: AsJson = False,
) -> None:
    """The same work on vLLM, OpenVINO GenAI and llama.cpp, in turns with ours. `make peers` installs them."""
    _require("torch")
    from dataclasses import replace

    from kvrelay_loadtest.peers.catalog import peer_named
    from kvrelay_loadtest.peers_bench import PeersBench, print_peers_bench, run_peers_bench
    from kvrelay_loadtest.show import Bars, print_json

    bench = PeersBench(_numbers(batches), prompt, tokens, _numbers(prefill), rounds, threads, model, gguf)
    if only:
        try:
            bench = replace(bench, peers=tuple(peer_named(name).name for name in only.split(",")))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    _leave_on_sigterm()
    document = run_peers_bench(bench, Bars())
    print_json(document) if as_json else print_peers_bench(document)


@app.command("quality")
def quality(
    model: Model = "demo",
    gguf: Annotated[str, typer.Option(show_default="the demo's", help="The file behind the format gguf.")] = "",
    weights: Annotated[str, typer.Option(help="Weight formats.")] = "bf16,int8,int4,gguf",
    kv: Annotated[str, typer.Option(help="KV formats, each with each weight format.")] = "bf16,int8",
    text: Annotated[str, typer.Option(show_default="the sample", help="A file, or a directory of *.txt.")] = "",
    window: Annotated[int, typer.Option(min=16, max=8192, help="Tokens of context at most.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=16, max=100_000, help="Of text.")] = 4096,
    threads: Threads = 0,
    limit_s: Annotated[float, typer.Option(min=1, max=3600, help="Formats after this are left out.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """What each weight and KV format does to the next token: KL divergence and top-1 agreement against float32."""
    _require("torch")
    from kvrelay_loadtest.quality_bench import QualityBench, print_quality_bench, run_quality_bench
    from kvrelay_loadtest.show import Bars, print_json

    bench = QualityBench(
        model=model, gguf=gguf, weights=tuple(weights.split(",")), kv=tuple(kv.split(",")), text=text, window=window,
        max_tokens=max_tokens, threads=threads, limit_s=limit_s,
    )  # fmt: skip
    document = run_quality_bench(bench, Bars())
    print_json(document) if as_json else print_quality_bench(document)


@app.command("serve")
def serve(
    url: Annotated[str, typer.Option(help="http://host:port of an OpenAI API, or grpc://host:port of ours.")],
    arrival: Annotated[str, typer.Option(help="poisson, constant, or trace.")] = "poisson",
    rate: Annotated[float, typer.Option(help="Requests per second (poisson, constant).")] = 1.0,
    requests: Annotated[int, typer.Option(min=1, help="At most this many.")] = 64,
    trace: Annotated[str, typer.Option(help="azure, mooncake, or a file: lengths, and times to replay.")] = "",
    rate_scale: Annotated[float, typer.Option(help="Replay this many times as fast.")] = 1.0,
    length_scale: Annotated[float, typer.Option(help="Prompts and answers this many times as long.")] = 1.0,
    min_input: Annotated[int, typer.Option(min=0, help="Rows with at least this many prompt tokens.")] = 0,
    max_input: Annotated[int, typer.Option(min=0, help="Rows with at most this many; 0: all.")] = 0,
    max_output: Annotated[int, typer.Option(min=0, help="Cut answers to this; 0: not.")] = 0,
    input_tokens: Annotated[int, typer.Option(min=1, help="Without a trace.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Without a trace.")] = 128,
    turns: Annotated[int, typer.Option(min=1, max=100, help="Turns of each session.")] = 1,
    turn_tokens: Annotated[int, typer.Option(min=1, help="New prompt tokens of later turns.")] = 64,
    think_s: Annotated[float, typer.Option(min=0, help="Between an answer and the next turn.")] = 1.0,
    slo: Annotated[str, typer.Option(help="Objectives in ms: ttft=500,itl=50 (also tpot, e2el).")] = "",
    warmup_s: Annotated[float, typer.Option(min=0, help="Requests scheduled before this are not counted.")] = 0.0,
    limit_s: Annotated[float, typer.Option(min=1, help="The run ends here at the latest.")] = 600.0,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Per request, without a byte.")] = 120.0,
    seed: Annotated[int, typer.Option(help="Of times and prompts.")] = 0,
    model: Annotated[str, typer.Option(show_default="the first one", help="Model id.")] = "",
    chat: Annotated[bool, typer.Option("--chat", help="Chat instead of plain completions.")] = False,
    stop_at_eos: Annotated[bool, typer.Option("--stop-at-eos", help="Do not send ignore_eos.")] = False,
    api_key: Annotated[str, typer.Option(envvar="KVRELAY_API_KEY")] = "",
    metrics_url: Annotated[list[str] | None, typer.Option(help="Poll this for KV use; repeatable.")] = None,
    label: Annotated[str, typer.Option(show_default="the URL", help="Name of the run.")] = "",
    save: Annotated[Path | None, typer.Option(help="Keep everything, for compare and report.")] = None,
    allow_remote: Annotated[bool, typer.Option("--allow-remote", help="Load another machine.")] = False,
    as_json: AsJson = False,
) -> None:
    """Open-loop load against a server: TTFT, TPOT, ITL, whole requests, goodput, errors."""
    _require("httpx")
    from kvrelay_loadtest import compare as comparing
    from kvrelay_loadtest import serve_bench
    from kvrelay_loadtest.show import Bars, print_json

    bench = serve_bench.ServeBench(
        url, arrival, rate, requests, trace, rate_scale, length_scale, min_input, max_input, max_output,
        input_tokens, output_tokens, turns, turn_tokens, think_s, slo, warmup_s, limit_s, timeout_s, seed, model,
        chat, not stop_at_eos, api_key, tuple(metrics_url or ()), label, allow_remote,
    )  # fmt: skip
    document = serve_bench.serve(bench, Bars())
    if save is not None:
        comparing.save_run(save, document)
    if as_json:
        print_json(serve_bench.without_records(document))
    else:
        serve_bench.print_serve_bench(document)


@app.command("relay")
def relay(
    quick: Annotated[bool, typer.Option("--quick", help="Three minutes: does it work?")] = False,
    start_rate: Annotated[float, typer.Option(min=0.02, max=100, help="Requests/s of the first run.")] = 0.5,
    tries: Annotated[int, typer.Option(min=1, max=20, help="Runs per system to find its goodput rate.")] = 3,
    seconds: Annotated[float, typer.Option(min=5, max=600, help="Of arrivals in each of them.")] = 25.0,
    final_seconds: Annotated[float, typer.Option(min=5, max=600, help="Of arrivals in the second pass.")] = 60.0,
    trace: Annotated[str, typer.Option(help="azure, mooncake, or a file.")] = "azure",
    min_input: Annotated[int, typer.Option(min=0)] = 1000,
    max_input: Annotated[int, typer.Option(min=0)] = 2000,
    max_output: Annotated[int, typer.Option(min=1, help="Longer answers are cut.")] = 128,
    threads: Annotated[int, typer.Option(min=2, help="Compute threads of each system.")] = 2,
    model: Model = "demo",
    kv_memory: Annotated[str, typer.Option(help="Per worker of ours.")] = "1GiB",
    systems: Annotated[str, typer.Option(help="In this order.")] = "vllm_cpu,relay,mixed",
    as_json: AsJson = False,
) -> None:
    """Prefill and decode apart, together, and vLLM: the same trace at the same rates on the same cores."""
    _require("httpx", "torch")
    from kvrelay_loadtest.relay_bench import RelayBench, print_relay_bench, run_relay_bench
    from kvrelay_loadtest.show import Bars, print_json

    bench = RelayBench(
        start_rate=start_rate, tries=tries, seconds=seconds, final_seconds=final_seconds, trace=trace,
        min_input=min_input, max_input=max_input, max_output=max_output, threads=threads, model=model,
        kv_memory=kv_memory, systems=tuple(systems.split(",")),
    )  # fmt: skip
    _leave_on_sigterm()
    document = run_relay_bench(bench.quick() if quick else bench, Bars())
    print_json(document) if as_json else print_relay_bench(document)


@app.command("router")
def router(
    streams: Annotated[str, typer.Option(help="Streams at once, for CPU per token.")] = "1,64,256",
    seconds: Annotated[float, typer.Option(min=0.5, max=60, help="Of each CPU measurement.")] = 5.0,
    probes: Annotated[int, typer.Option(min=5, max=10_000, help="Requests for the added TTFT.")] = 100,
    background: Annotated[int, typer.Option(min=1, max=400, help="Streams beside the probes.")] = 32,
    model: Annotated[str, typer.Option(help="Whose tokenizer.")] = "demo",
    as_json: AsJson = False,
) -> None:
    """What the router adds to the first token and costs per token, with workers that cost nothing."""
    from kvrelay_loadtest.children import ChildFailed
    from kvrelay_loadtest.router_bench import RouterBench, print_router_bench, run_router_bench
    from kvrelay_loadtest.show import Bars, print_json

    _leave_on_sigterm()
    try:
        document = run_router_bench(RouterBench(_numbers(streams), seconds, probes, background, model), Bars())
    except ChildFailed as error:
        raise ConfigError(str(error)) from error
    print_json(document) if as_json else print_router_bench(document)


@app.command("handoff")
def handoff(
    quick: Annotated[bool, typer.Option("--quick", help="Only shows that it works.")] = False,
    model: Model = "demo",
    as_json: AsJson = False,
) -> None:
    """Pipes alone, the part of a transfer that clients feel, and running streams while KV arrives."""
    _require("torch", "httpx")
    from kvrelay_loadtest.children import ChildFailed
    from kvrelay_loadtest.handoff_bench import HandoffBench, print_handoff_bench, run_handoff_bench
    from kvrelay_loadtest.show import Bars, print_json

    _leave_on_sigterm()
    bench = HandoffBench(model=model)
    try:
        document = run_handoff_bench(bench.quick() if quick else bench, Bars())
    except ChildFailed as error:
        raise ConfigError(str(error)) from error
    print_json(document) if as_json else print_handoff_bench(document)


@app.command("compare")
def compare(
    a: Annotated[Path, typer.Argument(help="Saved by bench serve --save.")],
    b: Annotated[Path, typer.Argument()],
    as_json: AsJson = False,
) -> None:
    """Two saved runs side by side."""
    from kvrelay_loadtest import compare as comparing
    from kvrelay_loadtest.show import print_json

    document = comparing.compare(comparing.load_run(a), comparing.load_run(b))
    print_json(document) if as_json else comparing.print_comparison(document)


@app.command("report")
def report(
    runs: Annotated[list[Path], typer.Argument(help="Saved by bench serve --save.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
    title: Annotated[str, typer.Option()] = "kvrelay bench",
    as_json: AsJson = False,
) -> None:
    """One self-contained HTML page of saved runs: tables, latency curves, goodput against rate, KV use."""
    _require("matplotlib")
    from kvrelay_loadtest.compare import load_run
    from kvrelay_loadtest.report import render
    from kvrelay_loadtest.show import print_json

    page = render([load_run(path) for path in runs], title)
    try:
        output.write_text(page)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}") from error
    summary = {"page": str(output), "runs": len(runs), "bytes": len(page)}
    print_json(summary) if as_json else typer.echo(f"{output}: {len(runs)} runs, {len(page) // 1024} KiB")


def _leave_on_sigterm() -> None:
    """So that `kill` ends the servers of a bench as Ctrl-C does, and leaves none behind."""
    import signal
    import sys

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


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
