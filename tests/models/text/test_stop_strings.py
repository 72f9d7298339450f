"""A stop string is found wherever the text is cut, nothing of it is shown, and nothing else is lost."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.models.text.stop_strings import StopMatcher

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the first moment at which the text ends with a stop string; the longest of them is cut off."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(text=st.text("abc", max_size=30), stops=STOPS, at=st.lists(st.integers(0, 30), max_size=8))
def test_equals_the_reference_for_every_cut(text: str, stops: list[str], at: list[int]) -> None:
    matcher = StopMatcher(stops)
    whole, stopped = reference(text, stops)
    shown = ""
    for start, end in pairwise([0, *sorted(at), len(text)]):
        shown += matcher.push(text[start:end])
        assert whole.startswith(shown)
    assert (shown + matcher.flush(), matcher.stopped) == (whole, stopped)
    assert text.startswith(whole + matcher.found) and (matcher.found in stops) == stopped


@given(text=st.text("abc", max_size=30), stops=STOPS, cut=st.integers(0, 30))
def test_the_stop_string_can_be_part_of_the_text(text: str, stops: list[str], cut: int) -> None:
    matcher = StopMatcher(stops, include_stop=True)
    shown = matcher.push(text[:cut]) + matcher.push(text[cut:]) + matcher.flush()
    without, stopped = reference(text, stops)
    assert matcher.stopped == stopped and text.startswith(shown) and shown.startswith(without)
    assert not stopped or any(shown == without + stop for stop in stops)


@given(text=st.text("ab", max_size=20), stops=STOPS)
def test_holds_back_no_more_than_it_must(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.push(text)
    if not matcher.stopped:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(text[i:]) for i in range(len(shown)) for stop in stops)


def test_nothing_after_the_stop() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("text E") == "text "
    assert matcher.push("ND more") == ""
    assert matcher.stopped
    assert matcher.push("more") + matcher.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])
