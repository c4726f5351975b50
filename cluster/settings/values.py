"""Parsers of single settings: each takes what YAML or a `key=value` override gave and returns the typed value.

A parser raises ValueError with the rule that was broken ("must be ..."); the caller adds the setting's name and where
it was written. `bool` is never taken for a number, and a number with a fraction never for an integer.
"""

import math
from collections.abc import Callable
from typing import TypeVar

Parser = Callable[[object], object]
T = TypeVar("T")


def integer(low: int, high: int | None = None) -> Callable[[object], int]:
    """A whole number in [low, high]."""
    rule = f"must be a whole number of at least {low}" if high is None else f"must be a whole number in {low}..{high}"

    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            raise ValueError(rule)
        return value

    return parse


def number(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[object], float]:
    """A finite number in [low, high], or in (low, high] with `above`."""
    rule = f"must be a number {'above' if above else 'of at least'} {low:g}"
    if math.isfinite(high):
        rule += f" and at most {high:g}"

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(rule)
        try:
            result = float(value)  # YAML 1.1 reads 1e3 as text
        except ValueError:
            raise ValueError(rule) from None
        if not (math.isfinite(result) and (low < result if above else low <= result) and result <= high):
            raise ValueError(rule)
        return result

    return parse


def boolean(value: object) -> bool:
    """true or false, and nothing that only looks like it."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def text(value: object) -> str:
    """A string of at least one visible character."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a text that is not empty (quote it in YAML if it looks like a number)")
    return value


def choice(*names: str) -> Callable[[object], str]:
    """One of the names."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return value

    return parse


def unset_or(parser: Callable[[object], T], word: str) -> Callable[[object], T | None]:
    """What `parser` takes, or null or `word` for None: the value is then found at start-up or the feature is off."""

    def parse(value: object) -> T | None:
        if value is None or value == word:
            return None
        try:
            return parser(value)
        except ValueError as error:
            raise ValueError(f"{error}, or {word}") from None

    return parse
