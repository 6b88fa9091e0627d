"""The same server through the `openai` package: change the base URL, keep the rest of your program.

    pip install openai
    python -m kvrelay.client.examples.openai_snippet --base-url http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import argparse


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Stream one answer with the openai client.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--prompt", default="Name the capital of Japan.")
    parsed = parser.parse_args(arguments)
    print_answer(parsed.base_url, parsed.api_key, parsed.prompt)


def print_answer(base_url: str, api_key: str, prompt: str) -> None:
    from openai import OpenAI  # not a dependency of the SDK

    client = OpenAI(base_url=base_url, api_key=api_key)
    model = client.models.list().data[0].id
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=256,
        temperature=0,  # the likeliest answer: the demo model is too small for the API's default of 1
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage is not None:
            print(f"\n[{chunk.usage.completion_tokens} tokens]")


if __name__ == "__main__":
    main()
