"""A thousand requests at once, as many under way as the server likes, with progress on one line.

    python -m kvrelay.client.examples.batch --count 1000 --concurrency 64
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from kvrelay.client import AsyncClient, KvrelayError


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Ask many questions concurrently.")
    parser.add_argument("--target", default="127.0.0.1:9000")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--count", type=int, default=1_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=16)
    parsed = parser.parse_args(arguments)
    prompts = [f"{number} times seven is" for number in range(parsed.count)]
    answers = asyncio.run(run(parsed.target, prompts, parsed.concurrency, parsed.max_tokens, parsed.api_key))
    failed = sum(answer is None for answer in answers)
    print(f"{len(answers) - failed} answers, {failed} failed")
    sys.exit(1 if failed else 0)


async def run(
    target: str, prompts: list[str], concurrency: int, max_tokens: int, api_key: str = ""
) -> list[str | None]:
    """Answers in the order of the prompts; None for one that failed after all retries."""
    places = asyncio.Semaphore(concurrency)
    num_done = 0

    async def one(client: AsyncClient, prompt: str) -> str | None:
        nonlocal num_done
        async with places:
            try:
                return await client.generate(prompt, max_tokens=max_tokens, temperature=0.0).text()
            except KvrelayError as error:
                print(f"\n{prompt!r}: [{error.code}] {error.message}", file=sys.stderr)
                return None
            finally:
                num_done += 1
                print(f"\r{num_done}/{len(prompts)}", end="", file=sys.stderr, flush=True)

    async with AsyncClient(target, api_key=api_key) as client:
        answers = await asyncio.gather(*(one(client, prompt) for prompt in prompts))
    print(file=sys.stderr)
    return list(answers)


if __name__ == "__main__":
    main()
