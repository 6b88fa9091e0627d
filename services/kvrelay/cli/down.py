"""`kvrelay down`: stop a local cluster, and what an owner that died has left behind."""

from __future__ import annotations

from kvrelay.cli import options
from kvrelay.cli.show import say

EXAMPLES = (
    "kvrelay down",
    "kvrelay down --http-port 8100",
)


def command(
    http_port: options.WhichCluster = None,
) -> None:
    """Stop the local cluster that kvrelay up --detach left running."""
    from kvrelay.cluster.owner import stop_cluster
    from kvrelay.cluster.state import find_state

    state = find_state(http_port)
    killed = stop_cluster(state)
    say(f"Stopped the cluster at {state.http}.")
    if killed:
        say(f"[yellow]Had to kill: {', '.join(killed)}[/yellow]")
