"""Every cell of the fault matrix once, greedy and seeded by turns; `make faults` runs each both ways."""

from __future__ import annotations

from itertools import product

import pytest

from tests.stories.fault_matrix import FAULTS, KINDS, MOMENTS, RECOVERY_S, run_cell

CELLS = [
    (fault, moment, list(KINDS)[(row + column) % len(KINDS)])
    for (row, fault), (column, moment) in product(enumerate(FAULTS), enumerate(MOMENTS))
]


@pytest.mark.parametrize(("fault", "moment", "kind"), CELLS)
def test_a_cell(fault: str, moment: str, kind: str) -> None:
    assert run_cell(moment, fault, kind).seconds <= FAULTS[fault].noticed_s + RECOVERY_S
