"""One Model T for all stories of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny import write_model_t


@pytest.fixture(scope="session")
def model_t(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_t(tmp_path_factory.mktemp("model") / "t")
