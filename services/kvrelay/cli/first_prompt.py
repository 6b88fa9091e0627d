"""One greedy answer over the real HTTP API, streamed to the terminal, with its time to first token taken apart."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from kvrelay.cli.show import show_timing, write_text
from kvrelay.core.errors import ConfigError

MAX_TOKENS = 64
_CONNECT_S, _SILENCE_S = 5.0, 300.0


def stream_answer(base_url: str, model: str, prompt: str, directory: Path) -> str:
    """Returns the text. Raises ConfigError with the server's message if it does not answer."""
    path, body = _request(model, prompt, directory)
    first_text_ms = 0.0
    parts: list[str] = []
    usage: dict[str, Any] = {}
    with httpx.Client(timeout=httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)) as client:
        begin = time.monotonic()  # now: a client's first act is to read the machine's certificates
        for event in _events(client, base_url + path, body):
            usage = event.get("usage") or usage
            for text in _texts(event):
                if not parts:
                    first_text_ms = (time.monotonic() - begin) * 1000
                parts.append(text)
                write_text(text)
    write_text("\n")
    show_timing(first_text_ms, usage)
    return "".join(parts)


def _request(model: str, prompt: str, directory: Path) -> tuple[str, dict[str, Any]]:
    """A chat if the model has a chat template, else a plain completion."""
    from kvrelay.text.tokenizer import Tokenizer

    body: dict[str, Any] = {
        "model": model,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if Tokenizer.from_directory(directory).has_chat_template:
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]}
    return "/v1/completions", {**body, "prompt": prompt}


def _texts(event: dict[str, Any]) -> Iterator[str]:
    for choice in event.get("choices", []):
        if text := choice.get("text") or (choice.get("delta") or {}).get("content"):
            yield text


def _events(client: httpx.Client, url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        with client.stream("POST", url, json=body) as answer:
            if answer.status_code != 200:
                answer.read()
                raise ConfigError(f"{url} answered {answer.status_code}: {answer.text.strip()}")
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ConfigError(f"the answer broke off: {event['error'].get('message', event['error'])}")
                yield event
    except httpx.HTTPError as error:
        raise ConfigError(f"{url} does not answer: {error}") from error
