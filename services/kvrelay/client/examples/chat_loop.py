"""A conversation in the terminal. Each turn finds the KV cache of the ones before by its session id.

    python -m kvrelay.client.examples.chat_loop --target 127.0.0.1:9000
"""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Iterable

from kvrelay.client import ChatMessage, Client, Delta, KvrelayError, Summary


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Chat with a kvrelay server; an empty line ends it.")
    parser.add_argument("--target", default="127.0.0.1:9000")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--max-tokens", type=int, default=256)
    parsed = parser.parse_args(arguments)
    with Client(parsed.target, api_key=parsed.api_key) as client:
        talk(client, questions(), parsed.max_tokens)


def questions() -> Iterable[str]:
    while True:
        try:
            question = input("you: ")
        except EOFError:
            return
        if not question.strip():
            return
        yield question


def talk(client: Client, asked: Iterable[str], max_tokens: int) -> None:
    conversation: list[ChatMessage] = []
    session_id = uuid.uuid4().hex
    for question in asked:
        conversation.append({"role": "user", "content": question})
        try:
            answer = one_turn(client, conversation, session_id, max_tokens)
        except KvrelayError as error:
            print(f"[{error.code}] {error.message}")
            conversation.pop()
            continue
        conversation.append({"role": "assistant", "content": answer})


def one_turn(client: Client, conversation: list[ChatMessage], session_id: str, max_tokens: int) -> str:
    answer = ""
    for event in client.chat(conversation, session_id=session_id, max_tokens=max_tokens):
        match event:
            case Delta(text=text):
                answer += text
                print(text, end="", flush=True)
            case Summary():
                cached, first_ms = event.num_cached_tokens, event.timing.first_token
                print(f"\n[{event.num_output_tokens} tokens, {cached} cached, first after {first_ms:.0f} ms]")
    return answer


if __name__ == "__main__":
    main()
