"""Stop strings found in a text that arrives in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Pattern:
    """Knuth, Morris and Pratt's automaton: `matched` is the longest prefix of `text` that ends here."""

    text: str
    fallback: list[int] = field(init=False)
    matched: int = 0

    def __post_init__(self) -> None:
        self.fallback = [0] * (len(self.text) + 1)
        length = 0
        for end in range(1, len(self.text)):
            while length and self.text[end] != self.text[length]:
                length = self.fallback[length]
            if self.text[end] == self.text[length]:
                length += 1
            self.fallback[end + 1] = length

    def advance(self, char: str) -> int:
        matched = self.matched
        if matched == len(self.text):
            matched = self.fallback[matched]
        while matched and self.text[matched] != char:
            matched = self.fallback[matched]
        if self.text[matched] == char:
            matched += 1
        self.matched = matched
        return matched


class StopStrings:
    """Passes a text on up to the first stop string, however the text is cut into pieces.

    The first match is the one that ends first; of those that end together, the longest. Held back is
    only what may yet turn out to be the beginning of a stop string. Cost: one automaton step per
    character and stop string.
    """

    def __init__(self, stops: Sequence[str], *, include_match: bool = False) -> None:
        """`stops` are not empty strings; with `include_match` the text ends after the match, not before it."""
        self._patterns = [_Pattern(stop) for stop in stops]
        self._include_match = include_match
        self._held = ""
        self.hit = False

    def feed(self, text: str, *, armed: bool = True) -> str:
        """The next piece; returns what may be passed on. After a hit nothing more is.

        A match that ends in a piece that is not `armed` does not count.
        """
        if self.hit:
            return ""
        if not self._patterns or not text:
            return text
        held = self._held + text
        start = len(self._held)
        for end, char in enumerate(text, start + 1):
            longest = 0
            for pattern in self._patterns:
                matched = pattern.advance(char)
                if armed and matched == len(pattern.text):
                    longest = max(longest, matched)
            if longest:
                self.hit = True
                self._held = ""
                return held[: end if self._include_match else end - longest]
        keep = max(p.matched if p.matched < len(p.text) else p.fallback[p.matched] for p in self._patterns)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """What is still held back, when the text has ended without a hit."""
        held, self._held = self._held, ""
        return held
