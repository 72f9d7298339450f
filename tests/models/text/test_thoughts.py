"""Thoughts are told from content, whatever pieces an answer comes in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.models.text.thoughts import CLOSING, OPENING, ThoughtReader

CASES = [
    (False, "<think>\nA cat?\nYes.\n</think>\n\nA cat.\n", "A cat?\nYes.", "A cat.\n"),
    (False, "\n <think>so</think>yes", "so", "yes"),
    (True, "\nA cat?\n\n</think>\n\nA cat.", "A cat?", "A cat."),
    (True, "\n<think>\nso</think>yes", "so", "yes"),
    (True, "<thin", "<thin", ""),
    (True, "no end", "no end", ""),
    (True, "cut </thi", "cut </thi", ""),
    (True, "</think>", "", ""),
    (False, "<think>\n\n</think>\n\nAt once.", "", "At once."),
    (False, " No thoughts: <think>x</think>", "", " No thoughts: <think>x</think>"),
    (False, "<thin", "", "<thin"),
    (False, "<thinking> aloud", "", "<thinking> aloud"),
    (False, "<think>a</think>b</think>c<think>", "a", "b</think>c<think>"),
    (True, "a < b </ think></think>\tc", "a < b </ think>", "c"),
    (False, "", "", ""),
    (False, "  \n", "", "  \n"),
]


def read(is_open: bool, pieces: list[str]) -> tuple[str, str]:
    reader = ThoughtReader(is_open)
    found = [*map(reader.push, pieces), reader.flush()]
    return "".join(one.thoughts for one in found), "".join(one.content for one in found)


@pytest.mark.parametrize(("is_open", "text", "thoughts", "content"), CASES)
def test_cases(is_open: bool, text: str, thoughts: str, content: str) -> None:
    assert read(is_open, [text]) == read(is_open, list(text)) == (thoughts, content)


TEXTS = st.lists(st.sampled_from([OPENING, CLOSING, "<", "</", "think>", "a", " ", "\n", "bc"]), max_size=12).map("".join)


@given(st.booleans(), TEXTS, st.lists(st.integers(0, 60), max_size=6))
def test_pieces_do_not_matter(is_open: bool, text: str, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:stop] for start, stop in zip(places, places[1:], strict=False)]
    whole = read(is_open, [text])
    assert read(is_open, pieces) == whole
    kept = "".join(whole)  # nothing but marks and blanks is lost
    assert sum(map(kept.count, "abc<")) >= sum(map(text.count, "abc<")) - 2


def test_thoughts_come_as_soon_as_they_are_certain() -> None:
    reader = ThoughtReader(False)
    steps = [("<th", ("", "")), ("ink>\n", ("", "")), ("A", ("A", "")), (" \n", ("", "")), ("b</", (" \nb", "")), ("c", ("</c", ""))]
    steps += [("</think>", ("", "")), ("\n", ("", "")), ("d", ("", "d")), (" ", ("", " "))]
    for text, expected in steps:
        assert reader.push(text) == expected, text
        assert reader.is_inside == (text in ("ink>\n", "A", " \n", "b</", "c"))
    assert reader.flush() == ("", "")
