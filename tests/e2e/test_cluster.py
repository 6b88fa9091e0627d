"""The whole cluster from outside: the OpenAI client, the SDK, `kvrelay ps`, Redis, kills. Model T, float32, greedy."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from kvrelay.client import Client, Delta, Finished, Started, Summary
from kvrelay.core.clock import SystemClock
from kvrelay.core.config import PlacementSettings
from kvrelay.core.ids import SessionId, TenantId
from kvrelay.core.placement import Role, SessionKey, SessionPlacement
from kvrelay.placement.codec import WorkerEntry, decode
from kvrelay.placement.open import open_registry
from tests.e2e.conftest import Cluster, free_ports, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name the capital of Japan."}]
PROMPT = "Prefill runs the first leg"
NUM_STREAMS = 32


@pytest.fixture
def openai(cluster: Cluster) -> OpenAI:
    return OpenAI(base_url=cluster.base_url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def sdk(cluster: Cluster) -> Client:
    return Client(cluster.state.grpc, timeout_s=60)


def ids_of(sdk: Client, prompt: str, max_tokens: int, session: str = "") -> list[int]:
    """Greedy output ids, each index exactly once and in order."""
    ids: list[int] = []
    with sdk.generate(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True, session_id=session) as stream:
        for event in stream:
            if isinstance(event, Delta) and event.tokens:
                assert event.first_index == len(ids)
                ids += [token.token_id for token in event.tokens]
    return ids


def test_openai_client_without_stream(openai: OpenAI, cluster: Cluster) -> None:
    answer = openai.chat.completions.create(
        model=cluster.model, messages=QUESTION, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    (choice,) = answer.choices
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob), "greedy takes the most likely"


def test_openai_client_streams_the_same(openai: OpenAI, cluster: Cluster) -> None:
    whole = openai.chat.completions.create(model=cluster.model, messages=QUESTION, max_tokens=24, temperature=0)
    chunks = list(
        openai.chat.completions.create(
            model=cluster.model, messages=QUESTION, max_tokens=24, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    finish = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert text == whole.choices[0].message.content
    assert finish == [whole.choices[0].finish_reason]
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_http_and_grpc_give_the_same_text(openai: OpenAI, sdk: Client, cluster: Cluster) -> None:
    over_http = openai.completions.create(model=cluster.model, prompt=PROMPT, max_tokens=24, temperature=0)
    assert sdk.generate(PROMPT, max_tokens=24, temperature=0).text() == over_http.choices[0].text


def test_the_sdk_sees_a_relay(sdk: Client) -> None:
    events = list(sdk.generate(PROMPT + " of the relay", max_tokens=8, temperature=0, ignore_eos=True))
    assert isinstance(events[0], Started)
    assert [event.finish_reason for event in events if isinstance(event, Finished)] == ["length"]
    summary = events[-1]
    assert isinstance(summary, Summary)
    assert (summary.mode, summary.num_attempts, summary.num_output_tokens) == ("relay", 1, 8)


def test_many_streams_at_once_over_http(openai: OpenAI, cluster: Cluster) -> None:
    def ask(number: int) -> str:
        chunks = openai.completions.create(
            model=cluster.model, prompt=f"{number} {PROMPT}", max_tokens=32, temperature=0, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        together = list(pool.map(ask, range(NUM_STREAMS)))
    assert together[::8] == [ask(number) for number in range(0, NUM_STREAMS, 8)]


def test_many_streams_at_once_over_grpc(sdk: Client) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        together = list(pool.map(lambda number: ids_of(sdk, f"{number} {PROMPT}", 32), range(NUM_STREAMS)))
    assert {len(ids) for ids in together} == {32}
    assert together[::8] == [ids_of(sdk, f"{number} {PROMPT}", 32) for number in range(0, NUM_STREAMS, 8)]


def test_ps_shows_every_process(cluster: Cluster) -> None:
    report = cluster.ps()
    assert set(report) == {"http", "grpc", "metrics", "redis", "processes"}
    assert (report["http"], report["redis"]) == (cluster.state.http, cluster.redis.url)
    assert sorted(item["role"] for item in report["processes"]) == ["decode", "decode", "prefill", "router"]
    assert all(set(item) == {"role", "id", "pid", "grpc"} for item in report["processes"])
    for item in report["processes"]:
        os.kill(item["pid"], 0)


def test_redis_shows_the_sessions_placement(sdk: Client, cluster: Cluster) -> None:
    placement = placed_session(sdk, cluster, PROMPT, "a-session")
    decoders = {record.worker_id for record in cluster.workers() if record.role.can_decode}
    assert placement.decode_worker in decoders
    assert placement.num_tokens > 20


def placed_session(sdk: Client, cluster: Cluster, prompt: str, session: str) -> SessionPlacement:
    """Ask until the placement is in Redis: a write while its breaker is open is dropped."""
    found: list[SessionPlacement] = []

    def ask() -> bool:
        ids_of(sdk, prompt, 20, session=session)
        placement = placement_of(cluster, session)
        found.extend([placement] if placement is not None else [])
        return bool(found)

    wait_for(ask, "the placement is written")
    return found[0]


def placement_of(cluster: Cluster, session: str) -> SessionPlacement | None:
    async def ask() -> SessionPlacement | None:
        settings = PlacementSettings(redis_url=cluster.redis.url, namespace=cluster.state.namespace)
        registry = open_registry(settings, SystemClock())
        try:
            return await registry.get_session(SessionKey(TenantId("default"), SessionId(session)))
        finally:
            await registry.close()

    return asyncio.run(ask())


def test_redis_may_stop_and_forget(sdk: Client, cluster: Cluster) -> None:
    expected = ids_of(sdk, PROMPT, 48)
    port = cluster.redis.port
    with sdk.generate(PROMPT, max_tokens=48, temperature=0, ignore_eos=True) as stream:
        first = next(event for event in stream if isinstance(event, Delta) and event.tokens)
        cluster.redis.stop()
        rest = [token.token_id for event in stream if isinstance(event, Delta) for token in event.tokens]
    assert [token.token_id for token in first.tokens] + rest == expected
    assert ids_of(sdk, PROMPT, 48) == expected, "a new request does not need Redis either"
    cluster.redis.start(port=port)
    cluster.wait_until_whole()
    assert ids_of(sdk, PROMPT, 48, session="after") == expected


def test_a_killed_decode_worker_costs_a_pause_and_nothing_else(sdk: Client, cluster: Cluster) -> None:
    cluster.wait_until_whole()
    expected = ids_of(sdk, PROMPT, 160)
    placement = placed_session(sdk, cluster, PROMPT, "kill")
    victim = next(record for record in cluster.workers() if record.worker_id == placement.decode_worker)
    ids: list[int] = []
    with sdk.generate(PROMPT, max_tokens=160, temperature=0, ignore_eos=True, session_id="kill") as stream:
        for event in stream:
            if isinstance(event, Delta) and event.tokens:
                if not ids:
                    os.kill(victim.pid, signal.SIGKILL)
                assert event.first_index == len(ids)
                ids += [token.token_id for token in event.tokens]
            if isinstance(event, Summary):
                assert event.num_attempts > 1
    assert ids == expected
    cluster.wait_until_whole()


def test_a_killed_prefill_worker_costs_a_pause_and_nothing_else(sdk: Client, cluster: Cluster) -> None:
    """It is stopped with a long prompt in its hands, so that it never finishes it, and then killed."""
    cluster.wait_until_whole()
    prompt = PROMPT * 7
    expected = ids_of(sdk, prompt, 24)
    victim = next(record for record in cluster.workers() if record.role is Role.PREFILL)
    os.kill(victim.pid, signal.SIGSTOP)

    def ask() -> tuple[list[int], Summary]:
        ids: list[int] = []
        with sdk.generate(prompt + "!", max_tokens=24, temperature=0, ignore_eos=True) as stream:
            for event in stream:
                if isinstance(event, Delta) and event.tokens:
                    assert event.first_index == len(ids)
                    ids += [token.token_id for token in event.tokens]
                if isinstance(event, Summary):
                    return ids, event
        raise AssertionError("the stream ended without a summary")

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask)
        wait_for(lambda: num_reserved(cluster) > 0 or answer.done(), "decode has reserved blocks for the request")
        os.kill(victim.pid, signal.SIGKILL)
        ids, summary = answer.result()
    cluster.wait_until_whole()
    assert ids == ids_of(sdk, prompt + "!", 24)
    assert summary.num_attempts > 1, "the request never was with the victim"
    assert ids_of(sdk, prompt, 24) == expected


def num_reserved(cluster: Cluster) -> int:
    """Over all workers, as of their newest lease."""
    with redis.Redis.from_url(cluster.state.redis, socket_timeout=5) as client:
        keys = list(client.scan_iter(f"kvr:{cluster.state.namespace}:w:*"))
        entries = [decode(client.get(key), WorkerEntry) for key in keys]
    return sum(entry.load.num_reserved for entry in entries if entry is not None)


def test_up_once_beside_another_cluster(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two Rays side by side; the second one answers, ends with 0 and leaves the first alone."""
    http_port, grpc_port = free_ports(2)
    ports = ["--http-port", str(http_port), "--grpc-port", str(grpc_port), "--metrics-port", "0"]
    arguments = ["--model", str(cluster.directory), "--dtype", "float32", "--num-blocks", "256", *ports]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("other")))
        done = cluster.kvrelay("up", "--once", "Name the capital of Japan.", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the prefill worker computes the prompt" in done.stdout
    cluster.wait_until_whole()
