"""The timeline of a step: phases of made-up steps, and of real ones on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.core.config import EngineSettings, ModelSettings
from kvrelay.engine.spec import EngineSpec
from kvrelay.model.load import load
from kvrelay_loadtest.timeline import PHASES, print_timeline, run_timeline, summary
from tests.support.tiny import write_model_t


def _step(begin: float, scale: float = 1e-6) -> dict[str, float]:
    """Phases of 1, 2, 3 … µs."""
    ends, at = {"": begin}, begin
    for number, name in enumerate(PHASES, 1):
        at += number * scale
        ends[name] = at
    return ends


def test_phases_are_medians_and_add_up_to_the_step() -> None:
    steps = [_step(1.0), _step(2.0, 5e-6), _step(3.0)]
    found = summary(steps, [])
    assert [phase["name"] for phase in found["phases"]] == list(PHASES)
    assert [phase["us"] for phase in found["phases"]] == pytest.approx([1, 2, 3, 4, 5, 6, 7], rel=1e-3)
    assert found["step_us"] == pytest.approx(28, rel=1e-3)
    assert (found["delivery_us"], found["hidden"]) == (None, None)


def test_a_delivery_is_hidden_as_far_as_it_falls_into_a_forward_pass() -> None:
    steps = [_step(1.0), _step(2.0)]  # the second forward pass: from 2.000006 to 2.000010
    found = summary(steps, [(2.000004, 2.000008), (0.5, 0.6), (2.5, 2.6)])
    assert found["delivery_us"] == pytest.approx(4, rel=1e-3)  # what lies outside the steps does not count
    assert found["hidden"] == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_real_step_has_every_phase(tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With all layers in one native call, and operator by operator (float16), where inputs are part of the forward."""
    settings = EngineSettings(max_num_seqs=2, num_blocks=64, growth_tokens=32, watermark_fraction=0.0)
    loaded = load(write_model_t(tmp_path), ModelSettings(dtype=dtype), settings, threads=1)
    spec = EngineSpec(
        loaded.num_blocks, loaded.layout.block_size, loaded.max_context, loaded.eos_token_ids,
        loaded.identity.fingerprint(), loaded.dtype, loaded.num_tokens,
    )  # fmt: skip
    found = run_timeline(loaded, settings, spec, batch=2, steps=6)
    by_name = {phase["name"]: phase["us"] for phase in found["phases"]}
    assert list(by_name) == list(PHASES)
    assert all(us >= 0 for us in by_name.values())
    assert by_name["inputs"] + by_name["forward"] > by_name["mailbox"]
    assert found["step_us"] >= max(by_name.values())
    assert found["delivery_us"] > 0
    assert 0 <= found["hidden"] <= 1
    print_timeline(found)
    assert "forward" in capsys.readouterr().out
