"""Fields of a JSON object, read one by one: null means absent, types are strict, every complaint names its field.

A bool is not a number, and 1.0 is not an integer. Keys nobody asks for are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvrelay.core.errors import BadRequest

MAX_NAME_CHARS = 256
"""Of model, user, session and name fields."""
MAX_STOPS = 4
MAX_STOP_CHARS = 1024


class Fields:
    def __init__(self, data: Mapping[str, Any], where: str = "") -> None:
        self._data = data
        self._where = where

    def path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def get(self, name: str) -> Any:
        return self._data.get(name)

    def integer(self, name: str) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        return whole_number(value, self.path(name))

    def count(self, name: str, low: int, high: int) -> int | None:
        value = self.integer(name)
        if value is not None and not low <= value <= high:
            raise self._wrong(name, f"from {low} to {high}", value)
        return value

    def number(self, name: str) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        return real_number(value, self.path(name))

    def boolean(self, name: str) -> bool | None:
        value = self.get(name)
        if value is None or isinstance(value, bool):
            return value
        raise self._wrong(name, "true or false", value)

    def text(self, name: str, max_chars: int | None = None) -> str | None:
        value = self.get(name)
        if value is None:
            return None
        text = well_formed(value, self.path(name))
        if max_chars is not None and len(text) > max_chars:
            raise BadRequest(f"{self.path(name)} may have {max_chars} characters, found {len(text)}", param=name)
        return text

    def object(self, name: str) -> dict[str, Any] | None:
        value = self.get(name)
        if value is None or isinstance(value, dict):
            return value
        raise self._wrong(name, "an object", value)

    def integers(self, name: str) -> list[int]:
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(name, "a list of integers", value)
        return [whole_number(item, f"{self.path(name)}[{i}]") for i, item in enumerate(value)]

    def stops(self) -> tuple[str, ...]:
        """`stop`: a string or up to four, none of them empty."""
        value = self.get("stop")
        if value is None:
            return ()
        stops = value if isinstance(value, list) else [value]
        if len(stops) > MAX_STOPS:
            raise BadRequest(f"stop: at most {MAX_STOPS} strings, found {len(stops)}", param="stop")
        for i, stop in enumerate(stops):
            text = well_formed(stop, f"stop[{i}]" if isinstance(value, list) else "stop")
            if not 0 < len(text) <= MAX_STOP_CHARS:
                raise BadRequest(f"stop strings have 1 to {MAX_STOP_CHARS} characters, found {len(text)}", param="stop")
        return tuple(stops)

    def logit_bias(self) -> dict[int, float]:
        """Token ids come as the keys of an object, so as strings."""
        bias = self.object("logit_bias") or {}
        result: dict[int, float] = {}
        for key, value in bias.items():
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise BadRequest(f"logit_bias: {_show(key)} is not a token id", param="logit_bias")
            result[int(key)] = real_number(value, f"logit_bias[{key}]")
        return result

    def _wrong(self, name: str, expected: str, value: Any) -> BadRequest:
        return wrong(self.path(name), expected, value)


def wrong(path: str, expected: str, value: Any) -> BadRequest:
    return BadRequest(f"{path} must be {expected}, found {_show(value)}", param=path)


def whole_number(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(path, "an integer", value)
    return value


def real_number(value: Any, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(path, "a number", value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise wrong(path, "a finite number", value)
    return number


def well_formed(value: Any, path: str) -> str:
    """A string that has a UTF-8 form: JSON can write half of a surrogate pair, which is no character (TOK-03)."""
    if not isinstance(value, str):
        raise wrong(path, "a string", value)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"{path} is not valid Unicode: half of a surrogate pair at character {error.start}", param=path
        ) from None
    return value


def _show(value: Any) -> str:
    """Short and safe to send back: never the whole of a large value, never half a surrogate pair."""
    if isinstance(value, list | dict):
        if not value:
            return "an empty list" if isinstance(value, list) else "an empty object"
        return "a list" if isinstance(value, list) else "an object"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 128:
        return "a huge integer"
    return ascii(value)[:60]
