"""`kvrelay bench compare`: two saved runs side by side, second over first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvrelay.core.errors import ConfigError
from kvrelay_loadtest.show import print_table

RATES = ("offered_rps", "completed_rps", "goodput_rps", "output_tokens_per_s")
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")


def load_run(path: Path) -> dict[str, Any]:
    """A document of `bench serve --save`. Raises ConfigError."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(document, dict) or "ttft_ms" not in document:
        raise ConfigError(f"{path} is no run that `kvrelay bench serve --save` wrote")
    return document


def save_run(path: Path, document: dict[str, Any]) -> None:
    """Raises ConfigError."""
    try:
        path.write_text(json.dumps(document))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def compare(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """`{a, b, rows: [{metric, a, b, ratio}]}`; the ratio is None where one of them has no number."""
    rows = [_row(name, first[name], second[name]) for name in RATES]
    for name in LATENCIES:
        rows += [_row(f"{name} {q}", first[name][q], second[name][q]) for q in ("p50", "p95", "p99")]
    rows.append(_row("errors", sum(first["errors"].values()), sum(second["errors"].values())))
    return {"a": first["label"], "b": second["label"], "rows": rows}


def _row(metric: str, a: float | None, b: float | None) -> dict[str, Any]:
    return {"metric": metric, "a": a, "b": b, "ratio": b / a if a and b is not None else None}


def print_comparison(document: dict[str, Any]) -> None:
    rows = [(row["metric"], row["a"], row["b"], row["ratio"]) for row in document["rows"]]
    print_table("b over a", ("metric", f"a: {document['a']}", f"b: {document['b']}", "b ÷ a"), rows)
