"""The parts of `kvrelay router` that need no process of their own."""

from __future__ import annotations

import pytest

from kvrelay.cli import router
from kvrelay.core.errors import ConfigError


def test_a_taken_http_port_names_its_flag() -> None:
    first = router._listen("127.0.0.1", 0)
    with first, pytest.raises(ConfigError, match="--http-port"):
        router._listen("127.0.0.1", first.getsockname()[1])
