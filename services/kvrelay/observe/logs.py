"""One line per request, for a person with `grep` and for a machine: `name=value`, or JSON.

    2026-01-31T12:00:00Z INFO kvrelay.request request=r1 outcome=ok ttft_ms=41.2 mode=relay

Values that come from clients are cut and escaped: a newline, a quote or half a surrogate pair in a session id can
neither forge a second line nor break the writer.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

MAX_VALUE_CHARS = 200
FIELDS = "kvrelay_fields"
"""Attribute of the log record that carries the values."""

Value = str | int | float | bool | None


def get_logger(name: str) -> logging.Logger:
    """`name` without the package: "request", "link"."""
    return logging.getLogger(f"kvrelay.{name}")


def log_event(logger: logging.Logger, message: str, *, level: int = logging.INFO, **values: Value) -> None:
    """One structured line; values that are None are left out."""
    if logger.isEnabledFor(level):
        present = {name: value for name, value in values.items() if value is not None}
        logger.log(level, "%s", message, extra={FIELDS: present})


def setup_logging(level: str = "INFO", *, as_json: bool = False, stream: TextIO | None = None) -> None:
    """Once per process, by its owner. Touches only kvrelay's own loggers; a second call replaces the first."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter())
    logger = logging.getLogger("kvrelay")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def sanitised(text: str) -> str:
    """Printable, encodable, at most MAX_VALUE_CHARS long."""
    cut = text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 1] + "…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in cut)


class PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        parts = [_timestamp(record), record.levelname, record.name, _message(record)]
        parts += [f"{name}={_plain(value)}" for name, value in _fields(record).items()]
        return " ".join(part for part in parts if part) + _traceback(self, record)


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Value] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        for name, value in _fields(record).items():
            line[name] = sanitised(value) if isinstance(value, str) else value
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _timestamp(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"


def _message(record: logging.LogRecord) -> str:
    return sanitised(record.getMessage())


def _fields(record: logging.LogRecord) -> dict[str, Value]:
    fields: dict[str, Value] = getattr(record, FIELDS, {})
    return fields


def _plain(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = sanitised(str(value))
    return json.dumps(text, ensure_ascii=False) if not text or any(char in text for char in ' "=') else text


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return "\n" + formatter.formatException(record.exc_info) if record.exc_info else ""
