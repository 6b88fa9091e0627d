"""What a worker says about its arithmetic, and what it refuses to promise."""

from __future__ import annotations

import pytest

from kvrelay.core.errors import ConfigError
from kvrelay.model.device import choose_numerics
from kvrelay_kernels.dispatch import CPU
from tests.kernels.native_sets import SETS, native


def test_native_kernels_are_exact_unless_told_otherwise() -> None:
    ops = native(SETS[0])
    said = choose_numerics("auto", ops, "bfloat16")
    assert said.startswith(f"native/{SETS[0]}@")
    assert said.endswith("/bfloat16")
    assert choose_numerics("exact", ops, "bfloat16") == said
    assert choose_numerics("exact", ops, "float32") != said
    assert choose_numerics("fast", ops, "bfloat16") == ""


def test_torch_promises_nothing() -> None:
    assert choose_numerics("auto", CPU, "bfloat16") == ""
    with pytest.raises(ConfigError, match="needs the native CPU kernels"):
        choose_numerics("exact", CPU, "bfloat16")


def test_an_unknown_setting_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="auto, exact, fast"):
        choose_numerics("precise", CPU, "float32")
