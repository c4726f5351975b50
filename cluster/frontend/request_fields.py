"""Typed access to the fields of a request body. Every refusal names the field and its limit.

Types are strict: `true` is no number, `"1"` and `1.0` are no integers. `null` counts as not given, as in
the OpenAI API. Messages never repeat what the client sent.
"""

import math
from collections.abc import Mapping
from typing import Any

from cluster.errors import RequestError


class RequestFields:
    """Reads one JSON object. All methods raise RequestError (400) with the field as `param`."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def get(self, name: str) -> Any:
        """The raw value, None when absent or null."""
        return self._body.get(name)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise RequestError(f"{name} must be true or false", param=name)
        return value

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int | None:
        """A whole number in [low, high]; `default` when not given."""
        value = self.get(name)
        if value is None:
            return default
        if not is_integer(value, low, high):
            raise RequestError(f"{name} must be a whole number from {low} to {high}", param=name)
        return int(value)

    def number(self, name: str, low: float, high: float, default: float, *, above_low: bool = False) -> float:
        """A finite number in [low, high], or (low, high] with `above_low`."""
        value = self.get(name)
        if value is None:
            return default
        if not is_number(value, low, high) or (above_low and value == low):
            bounds = f"above {low:g} and at most {high:g}" if above_low else f"from {low:g} to {high:g}"
            raise RequestError(f"{name} must be a number {bounds}", param=name)
        return float(value)

    def text(self, name: str, max_length: int) -> str | None:
        """A string of at most `max_length` characters."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or len(value) > max_length:
            raise RequestError(f"{name} must be a string of at most {max_length} characters", param=name)
        return value


def is_integer(value: Any, low: int, high: int) -> bool:
    """Whether it is a JSON integer in [low, high]; booleans are not."""
    return type(value) is int and low <= value <= high


def is_number(value: Any, low: float, high: float) -> bool:
    """Whether it is a finite JSON number in [low, high]; booleans are not, NaN never is."""
    return type(value) in (int, float) and low <= value <= high and math.isfinite(value)
