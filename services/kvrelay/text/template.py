"""The model's chat template: messages to the prompt text the model was trained on.

The template comes with the model and is trusted to be written by its authors, not to be harmless: it runs in
jinja2's sandbox, where it can change nothing and reach nothing but what it is given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrelay.core.errors import BadRequest, ConfigError

_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a template does to messages it was not written for."""


class ChatTemplate:
    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """`variables` are the special tokens by name (`bos_token`, ...), for the template's use."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the model's chat template is not valid: {error}") from error
        self._variables = dict(variables)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Up to and including the opening of the assistant's turn. Raises BadRequest if the template refuses."""
        try:
            return self._template.render(
                **self._variables, messages=messages, tools=tools, documents=None, add_generation_prompt=True
            )
        except _TEMPLATE_ERRORS as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}", param="messages") from error


def load_template(directory: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """From chat_template.jinja, else from tokenizer_config.json; None if the model has none."""
    source = _source(directory, config)
    return None if source is None else ChatTemplate(source, _special_tokens(config))


def _source(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
    return {name: token for name in names if (token := special_token(config, name)) is not None}


def special_token(config: Mapping[str, Any], name: str) -> str | None:
    """tokenizer_config.json writes a token as a string or as an object with its flags."""
    value = config.get(name)
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Templates expect plain JSON: jinja2's own filter would write `<` and `&` as escapes, for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
