"""`kvrelay ps`: the endpoints, the processes and the log files of a local cluster."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrelay.cli import options
from kvrelay.cli.show import console, say

if TYPE_CHECKING:
    from kvrelay.cluster.state import ClusterState

EXAMPLES = (
    "kvrelay ps",
    "kvrelay ps --json | jq .processes",
)


def command(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    http_port: options.WhichCluster = None,
) -> None:
    """Show the endpoints, processes and log files of the local cluster."""
    from kvrelay.cluster.state import find_live_state

    state = find_live_state(http_port)
    report = describe(state)
    if as_json:
        typer.echo(json.dumps(report))
        return
    _print_table(report)
    say(f"logs     {state.logs}: a file per process, and in the router's one line per request")


def describe(state: ClusterState) -> dict[str, Any]:
    """`{http, grpc, metrics, redis, processes: [{role, id, pid, grpc}]}`."""
    from kvrelay.cluster.members import members

    processes = [
        {"role": "router", "id": f"router-{router.pid}", "pid": router.pid, "grpc": state.grpc}
        for router in state.routers
    ]
    processes += [
        {"role": member.role, "id": member.id, "pid": member.pid, "grpc": member.grpc} for member in members(state)
    ]
    return {
        "http": state.http,
        "grpc": state.grpc,
        "metrics": state.metrics,
        "redis": state.redis,
        "processes": processes,
    }


def _print_table(report: dict[str, Any]) -> None:
    from rich.table import Table

    for name in ("http", "grpc", "metrics", "redis"):
        say(f"{name:<8} {report[name]}")
    table = Table("role", "id", "pid", "grpc", box=None)
    for item in report["processes"]:
        table.add_row(item["role"], item["id"], str(item["pid"]), item["grpc"])
    console.print(table)
