from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.observe.logs import get_logger, log_event, sanitised, setup_logging


@pytest.fixture
def restored() -> Iterator[None]:
    logger = logging.getLogger("kvrelay")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.mark.usefixtures("restored")
def test_one_plain_line_per_event() -> None:
    stream = io.StringIO()
    setup_logging(stream=stream)
    log_event(get_logger("request"), "done", request="r1", session="a\nINFO forged", ttft_ms=41.25, absent=None)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert lines[0].endswith('INFO kvrelay.request done request=r1 session="a\\\\nINFO forged" ttft_ms=41.25')


@pytest.mark.usefixtures("restored")
def test_json_lines_and_levels() -> None:
    stream = io.StringIO()
    setup_logging("warning", as_json=True, stream=stream)
    log_event(get_logger("request"), "quiet")
    log_event(get_logger("request"), "loud", level=logging.ERROR, tokens=3, user="\ud83d")
    line = json.loads(stream.getvalue())
    assert line["message"] == "loud"
    assert line["tokens"] == 3
    assert line["user"] == "\\ud83d"


@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=400))
def test_sanitised_text_is_one_encodable_line(text: str) -> None:
    clean = sanitised(text)
    clean.encode()
    assert len(clean.splitlines()) <= 1
