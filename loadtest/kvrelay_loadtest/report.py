"""`kvrelay bench report`: saved runs as one HTML page that needs nothing beside it. Plots are PNGs inside the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from kvrelay_loadtest.show import shown

PERCENTILE_COLUMNS = ("p50", "p95", "p99")
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .8rem;border-bottom:1px solid #ddd;"
    "text-align:right}td:first-child,th:first-child{text-align:left}img{max-width:100%}code{font-size:90%}"
    "small{color:#666}"
)


def render(runs: Sequence[dict[str, Any]], title: str = "kvrelay bench") -> str:
    """The page."""
    parts = [f"<h1>{escape(title)}</h1>", _table(runs)]
    for heading, draw in (
        ("Time to first token", _cdf("ttft_ms")),
        ("Between tokens", _cdf("itl_ms")),
        ("Whole request", _cdf("e2el_ms")),
        ("Goodput against offered rate", _goodput),
        ("KV in use", _kv_use),
    ):
        image = _plot(draw, runs)
        if image:
            parts.append(f'<h2>{heading}</h2><img alt="{heading}" src="data:image/png;base64,{image}">')
    parts += ["<h2>How it was measured</h2>", *(_source(run) for run in runs)]
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _table(runs: Sequence[dict[str, Any]]) -> str:
    names: tuple[str, ...] = ("run", "ok", "failed", "offered/s", "goodput/s", "output tokens/s")
    names += tuple(f"{name.upper()} {q} ms" for name in ("ttft", "itl") for q in PERCENTILE_COLUMNS)
    lines = ["<table><tr>", *(f"<th>{name}</th>" for name in names), "</tr>"]
    for run in runs:
        cells = [
            run["label"], run["ok"], sum(run["errors"].values()), run["offered_rps"], run["goodput_rps"],
            run["output_tokens_per_s"], *(run[f"{n}_ms"][q] for n in ("ttft", "itl") for q in PERCENTILE_COLUMNS),
        ]  # fmt: skip
        lines += ["<tr>", *(f"<td>{escape(shown(cell))}</td>" for cell in cells), "</tr>"]
    return "".join([*lines, "</table>"])


def _source(run: dict[str, Any]) -> str:
    meta = run["meta"]
    versions = ", ".join(f"{name} {version}" for name, version in meta["versions"].items())
    machine = f"{meta['cores']} cores {meta['cpu']}, load average {meta['load_average'][0]} at the start"
    return (
        f"<p><b>{escape(run['label'])}</b>: <code>{escape(meta['command'])}</code><br>"
        f"<small>{escape(meta['date'])} · {escape(machine)} · {escape(versions)}</small></p>"
    )


def _plot(draw: Callable[[Any, Sequence[dict[str, Any]]], bool], runs: Sequence[dict[str, Any]]) -> str:
    """A PNG in base64; empty if there was nothing to draw."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if not draw(axes, runs):
        return ""
    axes.grid(alpha=0.3)
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return base64.b64encode(buffer.getvalue()).decode()


def _cdf(name: str) -> Callable[[Any, Sequence[dict[str, Any]]], bool]:
    def draw(axes: Any, runs: Sequence[dict[str, Any]]) -> bool:
        found = [run for run in runs if run["cdf"][name]]
        for run in found:
            values, shares = zip(*run["cdf"][name], strict=True)
            axes.step(values, shares, where="post", label=run["label"])
        axes.set(xlabel="ms", ylabel="share of measurements", xscale="log", ylim=(0, 1.02))
        return bool(found)

    return draw


def _goodput(axes: Any, runs: Sequence[dict[str, Any]]) -> bool:
    """One line per label over its runs at different rates."""
    by_label: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        by_label.setdefault(run["label"], []).append((run["offered_rps"], run["goodput_rps"]))
    for label, points in by_label.items():
        offered, good = zip(*sorted(points), strict=True)
        axes.plot(offered, good, marker="o", label=label)
    top = max((run["offered_rps"] for run in runs), default=0.0)
    axes.plot([0, top], [0, top], linestyle=":", color="grey", label="all that was offered")
    axes.set(xlabel="offered requests/s", ylabel="requests/s within the objectives")
    return bool(runs)


def _kv_use(axes: Any, runs: Sequence[dict[str, Any]]) -> bool:
    found = False
    for run in runs:
        for url, points in run["kv_use"].items():
            if points:
                found = True
                seconds, shares = zip(*points, strict=True)
                axes.plot(seconds, shares, label=f"{run['label']} {url}")
    axes.set(xlabel="seconds", ylabel="share of the KV pool", ylim=(0, 1.02))
    return found
