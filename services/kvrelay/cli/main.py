"""`kvrelay`: one module per command. Heavy imports live inside the commands, so that `kvrelay --help` is quick."""

from __future__ import annotations

import sys

import typer

from kvrelay.cli import bench, chat, doctor, down, drain, ps, router, serve, up, version, worker
from kvrelay.cli.show import Bars
from kvrelay.core.errors import ConfigError

app = typer.Typer(
    name="kvrelay",
    help="Prefill runs the first leg of a request, hands the KV cache over, and decode runs the rest.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for _module in (up, down, ps, drain, serve, router, worker, chat, doctor, version):
    _epilog = "\n\n".join(("[bold]Examples[/bold]", *_module.EXAMPLES)) if _module.EXAMPLES else None
    app.command(_module.__name__.rpartition(".")[2], epilog=_epilog)(_module.command)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Errors that a user can do something about are one line, not a traceback."""
    try:
        try:
            app()
        finally:
            Bars.leave()
    except ConfigError as error:
        print(f"kvrelay: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
