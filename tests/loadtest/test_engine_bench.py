"""`bench engine` on a tiny model: the document is complete and the cells are what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvrelay.core.batch import StepPlan, StepResult
from kvrelay.core.config import EngineSettings, ModelSettings
from kvrelay.core.errors import ConfigError
from kvrelay.core.kv import KvLayout
from kvrelay.core.progress import NullProgress
from kvrelay.engine.fakes import FakeRunner
from kvrelay.engine.spec import EngineSpec
from kvrelay.model.load import load
from kvrelay_kernels.dispatch import ops_for
from kvrelay_kernels.linear.quantised import QuantisedWeight
from kvrelay_loadtest import engine_bench
from kvrelay_loadtest.engine_bench import EngineBench, check_weights, kv_bytes, run_engine_bench
from kvrelay_loadtest.engine_load import EngineFailed, Yard
from kvrelay_loadtest.machine import Machine, best_of, measure_machine
from kvrelay_loadtest.weight_bytes import tensors_of, weight_bytes
from tests.support.tiny import write_model_t

SPEC = EngineSpec(64, 16, 512, frozenset({257}), "fingerprint", "float32", 256)
SETTINGS = EngineSettings(max_num_seqs=8, growth_tokens=16, watermark_fraction=0.0)


def test_the_document_has_a_row_for_every_cell_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_bench, "measure_machine", lambda threads: Machine(10.0 + threads, 100.0))
    bench = EngineBench(
        model=str(write_model_t(tmp_path)), dtype="float32", batches=(1, 3), contexts=(48, 4096), prefill_tokens=(32,),
        steps=8, repeats=1, threads=1, kv_memory="1MiB",
    )  # fmt: skip
    monkeypatch.setattr(engine_bench, "read_gbps", lambda num_bytes: 2.0)  # less than from memory: it does not count
    document = run_engine_bench(bench, NullProgress())
    [form] = document["formats"]
    assert (form["weights"], form["kernels"], form["read_gbps"]) == ("f32", ops_for(torch.device("cpu")).name, 11.0)
    assert form["bytes"] > 0
    assert [(row["batch"], row["context"]) for row in document["rows"]] == [(1, 48), (3, 48)]
    for row in document["rows"]:
        assert row["tokens_per_s"] == pytest.approx(row["batch"] / row["step_ms"] * 1e3)
        assert 0 < row["python_ms"] < row["step_ms"]
    assert [(row["weights"], row["tokens"]) for row in document["prefill"]] == [("f32", 32)]
    assert document["prefill"][0]["tokens_per_s"] > 0
    assert len(document["meta"]["skipped"]) == 2
    assert (document["read_gbps"], document["gemm_gflops"]) == (11.0, 100.0)


def test_every_step_of_a_cell_decodes_the_whole_batch() -> None:
    yard = Yard(SETTINGS, SPEC, _Writing(FakeRunner()))
    yard.decode(batch=4, context=40, num_tokens=8)
    for _ in range(8):
        times = yard.step()
        assert yard.num_rows == 4
        assert 0 <= times.model_s <= times.total_s


def test_a_refused_sequence_voids_the_measurement() -> None:
    yard = Yard(SETTINGS, SPEC, FakeRunner())
    with pytest.raises(EngineFailed, match="never_fits"):
        yard.decode(batch=1, context=5000, num_tokens=1)


def test_weight_bytes_are_those_of_the_packed_matrices(tmp_path: Path) -> None:
    model = load(write_model_t(tmp_path), ModelSettings(dtype="bfloat16"), EngineSettings(num_blocks=4))
    layer = 64 * (4 + 2 * 2) * 16 + 4 * 16 * 64 + 3 * 64 * 128
    assert weight_bytes(model.weights) == 2 * (2 * layer + 320 * 64)


def test_codes_scales_and_offsets_of_a_packed_weight_all_count() -> None:
    codes, scales = torch.zeros(8, 32, dtype=torch.uint8), torch.zeros(8, 2, dtype=torch.float16)
    weight = QuantisedWeight(codes, scales, scales, bits=4, group=16)
    assert [tensor.nbytes for tensor in tensors_of((weight, 3, [codes]))] == [256, 32, 32, 256]


def test_kv_bytes_count_every_layer_key_and_value() -> None:
    assert kv_bytes(KvLayout(2, 2, 16, 16, "float32"), batch=3, context=10) == 3 * 10 * 2 * 2 * 2 * 16 * 4


def test_an_unknown_setting_of_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="nf2"):
        check_weights(("auto", "nf2"))


def test_the_yardsticks_are_positive() -> None:
    machine = measure_machine(read_bytes=1 << 20, gemm_sizes=(64,))
    assert machine.read_gbps > 0
    assert machine.gemm_gflops > 0
    assert best_of(Machine(1.0, 9.0), Machine(2.0, 3.0)) == Machine(2.0, 9.0)


class _Writing:
    """A `FakeRunner` whose reserved blocks hold what was sent: nothing lands for real in this yard."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner

    def run(self, plan: StepPlan) -> StepResult:
        for row in plan.rows:
            for position in range(row.num_computed):
                self._runner.kv.setdefault((row.block_table[position // 16], position % 16), 0)
        return self._runner.run(plan)
