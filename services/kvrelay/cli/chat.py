"""`kvrelay chat`: a conversation in the terminal, over the SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.cli.show import say, write_text
from kvrelay.core.errors import ConfigError, KvrelayError

if TYPE_CHECKING:
    from kvrelay.client import ChatMessage, Client, Options

_DEFAULT_PORT = 9000

EXAMPLES = (
    "kvrelay chat",
    'kvrelay chat --target 10.0.0.5:9000 --system "Answer in one sentence." --temperature 0',
)


def command(
    target: Annotated[str | None, typer.Option(show_default="the local cluster", help="host:port (gRPC).")] = None,
    model: Annotated[str, typer.Option(show_default="the only one", help="Model id.")] = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Per answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy.")] = 0.7,
    api_key: Annotated[str, typer.Option(envvar="KVRELAY_API_KEY", help="If the server wants one.")] = "",
) -> None:
    """Talk to a model; an empty line or Ctrl-D ends."""
    import uuid

    from kvrelay.client import Client

    options: Options = {"max_tokens": max_tokens, "temperature": temperature, "session_id": uuid.uuid4().hex}
    where = target or _local_target()
    with Client(where, api_key=api_key) as client:
        options["model"] = model or _only_model(client, where)
        say(f"[dim]{options['model']}; an empty line ends[/dim]")
        _converse(client, system, options)


def _local_target() -> str:
    """The local cluster's gRPC port, or the usual one."""
    from kvrelay.cluster.state import find_live_state, read_states

    return find_live_state().grpc if read_states() else f"127.0.0.1:{_DEFAULT_PORT}"


def _only_model(client: Client, where: str) -> str:
    try:
        return client.models()[0].id
    except KvrelayError as error:
        raise ConfigError(f"no kvrelay server answers on gRPC at {where}: {error.message}") from error


def _converse(client: Client, system: str, options: Options) -> None:
    conversation: list[ChatMessage] = [{"role": "system", "content": system}] if system else []
    while question := _ask():
        conversation.append({"role": "user", "content": question})
        try:
            conversation.append({"role": "assistant", "content": _answer(client, conversation, options)})
        except KvrelayError as error:
            say(f"[red]{error.message}[/red]")
            conversation.pop()


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _answer(client: Client, conversation: list[ChatMessage], options: Options) -> str:
    from kvrelay.client import Delta

    parts: list[str] = []
    with client.chat(conversation, **options) as stream:
        for event in stream:
            if isinstance(event, Delta):
                parts.append(event.text)
                write_text(event.text)
    write_text("\n")
    return "".join(parts)
