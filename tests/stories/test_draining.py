"""A worker goes down while it serves: its streams go on elsewhere with their KV. Model T, real workers, one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.core.events import Token
from kvrelay.core.ids import RequestId
from kvrelay.core.output import ChoiceFinished, Delta, GenerateRequest, Output, Summary
from kvrelay.core.request import SamplingParams
from kvrelay.router import router as router_module
from kvrelay.worker.process import WorkerProcess
from tests.stories.house import House, house
from tests.stories.test_one_answer import never_local
from tests.support.empty import assert_worker_is_empty
from tests.support.tiny import write_model_t
from tests.worker.cluster import CONFIG
from tests.worker.support import ids

ROOMY = replace(CONFIG, engine=replace(CONFIG.engine, num_blocks=256))
"""One decode worker can hold them all: nobody is preempted."""
TEXT = "A runner who leaves the track hands the baton over, and the race goes on as if nothing had been."
LONG = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
KINDS = [
    LONG,
    replace(LONG, logprobs=3),
    replace(LONG, temperature=1.0, seed=5),
    replace(LONG, temperature=0.8, seed=6, top_p=0.9, logprobs=1),
    replace(LONG, frequency_penalty=0.6, presence_penalty=0.4, repetition_penalty=1.2),
]


@pytest.fixture(scope="module")
def model_t(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_t(tmp_path_factory.mktemp("model") / "t")


@pytest.fixture(autouse=True)
def relay_wherever_there_is_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "place", never_local)


class Stream:
    """One request: what came out, per choice, and how it ended."""

    def __init__(self, of: House, number: int, prefix: str) -> None:
        sampling, n = KINDS[number % len(KINDS)], 1 + number % 2
        prompt = ids([256, *TEXT.encode()[: 3 + 5 * number]])
        self.request = GenerateRequest(RequestId(f"{prefix}{number}"), prompt, sampling, n=n)
        self.tokens: dict[int, list[Token]] = {choice: [] for choice in range(n)}
        self.text: dict[int, str] = dict.fromkeys(range(n), "")
        self.ends: dict[int, tuple[str, str | int | None]] = {}
        self.summary: Summary | None = None
        self.progressed = asyncio.Event()
        self._outputs: AsyncIterator[Output] = of.router.generate(self.request)

    async def run(self) -> Stream:
        async for output in self._outputs:
            if isinstance(output, Delta):
                assert output.first_index == len(self.tokens[output.choice])
                self.tokens[output.choice] += output.tokens
                self.text[output.choice] += output.text
                if all(len(tokens) > 4 for tokens in self.tokens.values()):
                    self.progressed.set()
            elif isinstance(output, ChoiceFinished):
                self.ends[output.choice] = (output.finish_reason, output.stop_reason)
            elif isinstance(output, Summary):
                self.summary = output
        return self

    def assert_equals(self, undisturbed: Stream) -> None:
        assert (self.text, self.ends) == (undisturbed.text, undisturbed.ends)
        for choice, tokens in self.tokens.items():
            others = undisturbed.tokens[choice]
            assert [token.token_id for token in tokens] == [token.token_id for token in others]
            for mine, theirs in zip(tokens, others, strict=True):
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
                assert len(mine.top) == len(theirs.top)
        assert self.summary is not None
        assert undisturbed.summary is not None
        assert self.summary.num_output_tokens == undisturbed.summary.num_output_tokens
        assert self.summary.num_prompt_tokens == undisturbed.summary.num_prompt_tokens


async def run_all(of: House, count: int, prefix: str) -> list[Stream]:
    return await asyncio.gather(*(Stream(of, number, prefix).run() for number in range(count)))


def busiest(of: House) -> WorkerProcess:
    return max(of.workers, key=lambda worker: worker.load().num_running)


async def test_a_decode_worker_that_drains_gives_its_streams_away(model_t: Path) -> None:
    async with house(model_t, "prefill", "decode", "decode", config=ROOMY) as relay:
        undisturbed = await run_all(relay, 8, "plain")
        streams = [Stream(relay, number, "moved") for number in range(8)]
        running = [asyncio.ensure_future(stream.run()) for stream in streams]
        for stream in streams:
            await stream.progressed.wait()
        leaver = busiest(relay)
        assert leaver.load().num_running > 0
        assert await leaver.drain(30.0)
        await leaver.stop()
        assert not all(task.done() for task in running), "it did not wait for their ends"
        for task, before in zip(running, undisturbed, strict=True):
            stream = await task
            stream.assert_equals(before)
            assert stream.summary is not None
            assert stream.summary.num_attempts == 1, "moved, not replayed"
        assert relay.router.metrics.registry.get_sample_value("kvrelay_migrations_total") > 0
        for worker in relay.workers:
            assert_worker_is_empty(worker.engine)


async def test_a_prefill_worker_that_drains_finishes_its_pushes(model_t: Path) -> None:
    async with house(model_t, "prefill", "prefill", "decode", config=ROOMY) as relay:
        undisturbed = await run_all(relay, 8, "plain")
        running = [asyncio.ensure_future(Stream(relay, number, "again").run()) for number in range(8)]
        leaver = relay.workers[0]
        assert await leaver.drain(30.0)
        await leaver.stop()
        for task, before in zip(running, undisturbed, strict=True):
            (await task).assert_equals(before)
        for worker in relay.workers:
            assert_worker_is_empty(worker.engine)
