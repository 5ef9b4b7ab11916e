"""Laws of the stop matcher."""

import hypothesis
import pytest
from hypothesis import strategies as st

from metrale_jax.text import StopMatcher

# Two letters make overlaps and false starts likely.
_TEXTS = st.text("ab", max_size=30)
_STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def _first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(end, stop) of the stop string completed first; of equal ends, the longest."""
    found = [
        (text.find(stop) + len(stop), -len(stop), stop)
        for stop in stops
        if stop in text
    ]
    if not found:
        return None
    end, _, stop = min(found)
    return end, stop


def _cut(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pairs = zip(borders[:-1], borders[1:], strict=True)
    return [text[start:end] for start, end in pairs]


@pytest.mark.parametrize("include", [False, True], ids=["exclude_stop", "include_stop"])
@hypothesis.given(text=_TEXTS, stops=_STOPS, cuts=st.lists(st.integers(0, 99)))
def test_released_text_depends_on_the_text_alone(
    include: bool, text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops, include_stop=include)
    released = "".join(matcher.feed(piece) for piece in _cut(text, cuts))
    released += matcher.finish()
    first = _first_stop(text, stops)
    if first is None:
        assert (released, matcher.matched) == (text, None)
        return
    end, stop = first
    assert matcher.matched == stop
    assert released == text[: end if include else end - len(stop)]


@hypothesis.given(text=_TEXTS, stops=_STOPS)
def test_only_what_may_become_a_stop_string_is_held(
    text: str, stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    released = ""
    for end in range(1, len(text) + 1):
        released += matcher.feed(text[end - 1])
        if matcher.matched is not None:
            return
        seen = text[:end]
        may_begin_a_stop = [
            start
            for start in range(end + 1)
            if any(stop.startswith(seen[start:]) for stop in stops) or start == end
        ]
        assert released == seen[: may_begin_a_stop[0]]


@hypothesis.given(text=_TEXTS, stops=_STOPS)
def test_nothing_is_held_where_the_stop_is_shown(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops, include_stop=True)
    for character in text:
        released = matcher.feed(character)
        assert released == character
        if matcher.matched is not None:
            return


def test_false_start_is_released() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.feed(piece) for piece in ("xE", "N", "E", "NZ")] == [
        "x",
        "",
        "EN",
        "ENZ",
    ]
    assert matcher.finish() == ""


@pytest.mark.parametrize(
    ("stops", "matched", "shown"),
    [
        (["bc", "abcd"], "bc", "xa"),
        (["abcd", "cd"], "abcd", "x"),
        (["cd", "abcd"], "abcd", "x"),
        (["e", "xyz"], "e", "xabcd"),
    ],
    ids=["inner_ends_first", "longest_of_equal_end", "order_is_no_matter", "last"],
)
def test_overlapping_stop_strings(stops: list[str], matched: str, shown: str) -> None:
    matcher = StopMatcher(stops)
    assert matcher.feed("xabcde") + matcher.finish() == shown
    assert matcher.matched == matched


def test_text_after_the_match_is_dropped() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.feed("a\n\nb") == "a"
    assert matcher.feed("c") == ""
    assert matcher.finish() == ""


def test_long_stop_strings_cost_by_the_character() -> None:
    """Many long, self-similar stop strings over a text that almost matches them all."""
    stops = ["a" * 5000 + str(index) for index in range(20)]
    matcher = StopMatcher(stops)
    released = matcher.feed("a" * 20_000)
    assert len(released) == 15_000
    assert matcher.feed("7") == ""
    assert matcher.matched == stops[7]


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        ([""], r"`stop_strings`\[0\] must be a string of at least one character"),
        (["a", ""], r"`stop_strings`\[1\]"),
        ([1], r"`stop_strings`\[0\].* got 1"),
        ("END", "must be a sequence of strings"),
    ],
    ids=["empty", "second_empty", "number", "bare_string"],
)
def test_bad_stop_strings_are_refused(stops: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StopMatcher(stops)
