"""`bench serve` against a small OpenAI-compatible server on a real socket, then `compare` and `report`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvrelay.core.errors import ConfigError
from kvrelay.core.progress import NullProgress
from kvrelay_loadtest.compare import compare, load_run, save_run
from kvrelay_loadtest.gauges import kv_use
from kvrelay_loadtest.report import render
from kvrelay_loadtest.serve_bench import ServeBench, check, run_serve_bench, visits_of, without_records
from kvrelay_loadtest.sse import SseParser
from kvrelay_loadtest.targets import TargetFailed, is_loopback, piece_of


@asynccontextmanager
async def _server(status: str = "200 OK", tail: str = "data: [DONE]\n\n") -> AsyncIterator[str]:
    """Streams as many chunks as `max_tokens` says."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = re.search(r"content-length: (\d+)", head, re.I)
        body = json.loads(await reader.readexactly(int(length.group(1)))) if length else {}
        writer.write(f"HTTP/1.1 {status}\r\nconnection: close\r\n\r\n".encode())
        if head.startswith("GET"):
            writer.write(b'{"data": [{"id": "tiny"}]}')
        else:
            assert body["model"] == "tiny"
            for _ in range(body["max_tokens"]):
                writer.write(b'data: {"choices": [{"text": " x"}]}\n\n')
                await writer.drain()
            usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": body["max_tokens"]}
            writer.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n{tail}".encode())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_run_counts_tokens_latencies_and_goodput(tmp_path: Path) -> None:
    async with _server() as url:
        bench = ServeBench(url, "constant", 200.0, 5, input_tokens=7, output_tokens=4, slo="ttft=5000", label="one")
        document = await run_serve_bench(bench, NullProgress())
    assert (document["ok"], document["errors"]) == (5, {})
    assert document["goodput_rps"] == document["completed_rps"] > 0
    assert [(row["num_prompt"], row["num_output"]) for row in document["records"]] == [(7, 4)] * 5
    assert "records" not in without_records(document)
    save_run(tmp_path / "a.json", document)
    saved = load_run(tmp_path / "a.json")
    rows = {row["metric"]: row for row in compare(saved, saved)["rows"]}
    assert rows["ttft_ms p50"]["ratio"] == 1.0
    assert rows["errors"]["ratio"] is None
    page = render([saved, saved])
    assert page.count("data:image/png;base64,") == 4
    assert not re.search(r'(?:src|href)="(?!data:)', page)


@pytest.mark.parametrize(
    ("status", "tail", "kind"),
    [
        ("429 Too Many", "", "http_429"),
        ("200 OK", "", "truncated"),
        ("200 OK", 'event: error\ndata: {"error": {"message": "x"}}\n\n', "sse_error"),
    ],
)
async def test_failures_have_a_kind(status: str, tail: str, kind: str) -> None:
    async with _server(status, tail) as url:
        document = await run_serve_bench(ServeBench(url, "constant", 100.0, 2, model="tiny"), NullProgress())
    assert document["errors"] == {kind: 2}
    assert document["ttft_ms"]["p50"] is None


async def test_nobody_there_is_an_error_of_its_own() -> None:
    document = await run_serve_bench(
        ServeBench("http://127.0.0.1:9", "constant", 100.0, 1, model="tiny"), NullProgress()
    )
    assert document["errors"] == {"connect": 1}


def test_load_stays_on_this_machine_unless_told_otherwise() -> None:
    with pytest.raises(ConfigError, match="--allow-remote"):
        check(ServeBench("http://example.org:80"))
    check(ServeBench("http://example.org:80", allow_remote=True))
    assert is_loopback("127.0.0.3")
    assert is_loopback("::1")
    assert not is_loopback("10.0.0.1")


@pytest.mark.parametrize(
    "wrong",
    [
        ServeBench("ftp://127.0.0.1"),
        ServeBench("http://127.0.0.1", arrival="bursts"),
        ServeBench("http://127.0.0.1", arrival="trace"),
        ServeBench("http://127.0.0.1", rate=0),
        ServeBench("http://127.0.0.1", limit_s=1e6),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_sent(wrong: ServeBench) -> None:
    with pytest.raises(ConfigError):
        check(wrong)


def test_a_replayed_trace_keeps_times_and_shared_prefixes() -> None:
    bench = ServeBench(
        "http://127.0.0.1", "trace", requests=20, trace="mooncake", rate_scale=10.0, length_scale=0.01, turns=2
    )
    visits = visits_of(bench)
    assert visits == visits_of(bench)
    assert len({visit.session_id for visit in visits}) == 20
    first_words = {visit.turns[0].text.split()[0] for visit in visits}
    assert len(first_words) < 5
    assert all(len(visit.turns) == 2 for visit in visits)
    with pytest.raises(ConfigError, match="no row"):
        visits_of(ServeBench("http://127.0.0.1", trace="azure", min_input=10**6, max_input=10**6))


def test_events_survive_any_cut() -> None:
    text = b'data: {"a": 1}\r\n\r\n: comment\n\nevent: error\ndata: x\ndata: y\n\ndata:[DONE]\n\n'
    expected = [("", '{"a": 1}'), ("error", "x\ny"), ("", "[DONE]")]
    for size in range(1, len(text) + 1):
        parser = SseParser()
        chunks = [text[i : i + size] for i in range(0, len(text), size)]
        assert [event for chunk in chunks for event in parser.feed(chunk)] == expected


def test_chunks_of_both_endpoints_are_understood() -> None:
    text, delta = piece_of({"choices": [{"text": "a"}]}), piece_of({"choices": [{"delta": {"content": "b"}}]})
    assert text is not None
    assert delta is not None
    assert (text.text, delta.text) == ("a", "b")
    assert piece_of({"choices": [{"delta": {"role": "assistant"}}]}) is None
    with pytest.raises(TargetFailed, match="sse_error"):
        piece_of({"error": {"message": "x"}})


def test_kv_use_is_read_from_ours_and_from_vllm() -> None:
    ours = 'kvrelay_kv_blocks{state="free"} 50.0\nkvrelay_kv_blocks{state="held"} 40.0\n'
    assert kv_use(ours + 'kvrelay_kv_blocks{state="cached"} 10.0\n') == pytest.approx(0.4)
    assert kv_use('vllm:kv_cache_usage_perc{engine="0"} 0.25\n') == 0.25
    assert kv_use("something_else 1\n") is None
