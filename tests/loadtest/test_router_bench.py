"""`bench router`'s parts: a worker that steps for all its sequences at once, a client that only counts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvrelay_loadtest.children import Child, ChildFailed, cpu_s
from kvrelay_loadtest.raw_stream import RawStream, StreamBroken
from kvrelay_loadtest.router_bench import DirectProbe, Meter
from kvrelay_loadtest.stepped_worker import SteppedWorker, cycling_letters


async def test_sequences_of_a_stepped_worker_move_together() -> None:
    worker = SteppedWorker(step_s=0.01)
    counts = [0, 0]

    async def sequence(number: int) -> None:
        for _ in range(4):
            await worker.step()
            counts[number] += 1

    first = asyncio.create_task(sequence(0))
    second = asyncio.create_task(sequence(1))
    await asyncio.sleep(0)
    assert counts == [1, 1]
    ticking = asyncio.create_task(worker.run())
    await asyncio.gather(first, second)
    ticking.cancel()
    assert counts == [4, 4]


async def test_a_direct_probe_gets_its_first_token_without_a_tick() -> None:
    worker = SteppedWorker(step_s=3600.0)
    record = await worker.start()
    try:
        async with DirectProbe(record.address) as probe:
            assert await probe.first_token_s() > 0
            assert await probe.first_token_s() > 0
    finally:
        await worker.stop()
    assert [cycling_letters([], index, 0) for index in (0, 27)] == [97, 98]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
async def test_chunks_are_counted_however_they_are_cut(size: int) -> None:
    body = b"".join(b'data: {"choices": [{"text": "x"}]}\n\n' for _ in range(5)) + b"data: [DONE]\n\n"
    seen: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for i in range(0, len(body), size):
            writer.write(body[i : i + size])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        stream = RawStream(url, {"prompt": "x"}, lambda count, _: seen.append(count))
        await stream.open()
        await stream.run()
    assert sum(seen) == 5


async def test_a_refusal_is_no_stream() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        stream = RawStream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {}, lambda *_: None)
        await stream.open()
        with pytest.raises(StreamBroken, match="429"):
            await stream.run()


def test_a_meter_knows_when_every_stream_runs() -> None:
    meter = Meter(2)
    first, second = meter.listener(0), meter.listener(1)
    first(3, 0.0)
    first(1, 0.0)
    assert not meter.all_running.is_set()
    second(1, 0.0)
    assert meter.all_running.is_set()
    assert meter.count == 5


def test_a_child_is_waited_for_and_ended(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = f"import time, pathlib; pathlib.Path({str(ready)!r}).write_text('{{\"a\": 1}}'); time.sleep(60)"
    with Child("sleeper", ["python3", "-c", code]) as child:
        assert child.wait_for_file(ready, 20.0) == {"a": 1}
        assert cpu_s(child.pid) > 0
    with pytest.raises(FileNotFoundError):
        cpu_s(child.pid)


def test_a_child_that_ends_says_why(tmp_path: Path) -> None:
    with (
        Child("broken", ["python3", "-c", "raise SystemExit('no such port')"]) as child,
        pytest.raises(ChildFailed, match="broken ended: no such port"),
    ):
        child.wait_for_file(tmp_path / "never", 20.0)
