"""Stop strings against a naive search over the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.frontend.stop_strings import StopStrings

ALPHABET = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def naive(pieces: list[tuple[str, bool]], stops: list[str], include: bool) -> tuple[str, bool]:
    """The first end of an armed match, and of the matches that end there the longest."""
    text = "".join(piece for piece, _ in pieces)
    armed = [flag for piece, flag in pieces for _ in piece]
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches and armed[end - 1]:
            return text[: end if include else end - max(map(len, matches))], True
    return text, False


@given(st.lists(st.tuples(ALPHABET, st.booleans())), STOPS, st.booleans())
def test_any_pieces_equal_a_naive_search(pieces: list[tuple[str, bool]], stops: list[str], include: bool) -> None:
    matcher = StopStrings(stops, include_match=include)
    out = []
    for piece, armed in pieces:
        out.append(matcher.feed(piece, armed=armed))
        if matcher.hit:
            break
    else:
        out.append(matcher.flush())
    assert ("".join(out), matcher.hit) == naive(pieces, stops, include)


@given(st.lists(ALPHABET), STOPS)
def test_only_a_possible_beginning_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    text = sent = ""
    for piece in pieces:
        text += piece
        sent += matcher.feed(piece)
        if matcher.hit:
            return
        held = text[len(sent) :]
        longest = max((size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])), default=0)
        assert held == text[len(text) - longest :]


def test_nothing_is_passed_on_after_a_hit() -> None:
    matcher = StopStrings(["b"])
    assert matcher.feed("ab") == "a"
    assert matcher.hit
    assert matcher.feed("more") == ""
    assert matcher.flush() == ""


def test_a_match_may_begin_before_it_counts() -> None:
    matcher = StopStrings(["abc"])
    assert matcher.feed("xab", armed=False) == "x"
    assert matcher.feed("cd") == ""
    assert matcher.hit


def test_a_match_that_did_not_count_is_text() -> None:
    matcher = StopStrings(["ab"])
    assert matcher.feed("ab", armed=False) == "ab"
    assert matcher.feed("cab") == "c"
    assert matcher.hit


def test_a_long_repetitive_text_is_cut_in_one_pass() -> None:
    matcher = StopStrings(["a" * 1000 + "b"])
    text = "".join(matcher.feed("aaaa") for _ in range(2500))
    assert len(text) == 9000
    assert matcher.feed("ab!") == "a"
    assert matcher.hit
