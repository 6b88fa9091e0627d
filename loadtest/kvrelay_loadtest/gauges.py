"""KV use over time: what a server's `/metrics` say, read once a second while a load runs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import httpx

POLL_S = 1.0
_OURS = re.compile(r'^kvrelay_kv_blocks\{[^}]*state="(\w+)"[^}]*\}\s+(\S+)', re.M)
_PLACEMENTS = re.compile(r'^kvrelay_placements_total\{[^}]*mode="(\w+)"[^}]*\}\s+(\S+)', re.M)
_VLLM = re.compile(r"^vllm:(?:gpu_|kv_)cache_usage_perc(?:\{[^}]*\})?\s+(\S+)", re.M)


def kv_use(text: str) -> float | None:
    """Share of the KV pool in use: held or draining, of all blocks. None if the text does not tell."""
    ours = _OURS.findall(text)
    if ours:
        blocks = [(state, float(value)) for state, value in ours]
        total = sum(value for _, value in blocks)
        return sum(value for state, value in blocks if state in ("held", "draining")) / total if total else None
    theirs = _VLLM.search(text)
    return float(theirs.group(1)) if theirs else None


def placements(text: str) -> dict[str, float]:
    """What our router's `/metrics` say of how requests were placed: mode → attempts."""
    return {mode: float(count) for mode, count in _PLACEMENTS.findall(text)}


class GaugeWatch:
    """`async with`: polls every URL until the end; `series[url]` is a list of [seconds, share]."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.series: dict[str, list[tuple[float, float]]] = {url: [] for url in urls}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> GaugeWatch:
        self._task = asyncio.create_task(self._poll()) if self.series else None
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        async with httpx.AsyncClient(timeout=POLL_S, trust_env=False) as http:
            while True:
                for url, points in self.series.items():
                    share = await _read(http, url)
                    if share is not None:
                        points.append((loop.time() - start, share))
                await asyncio.sleep(POLL_S)


async def _read(http: httpx.AsyncClient, url: str) -> float | None:
    try:
        return kv_use((await http.get(url)).text)
    except httpx.HTTPError:
        return None
