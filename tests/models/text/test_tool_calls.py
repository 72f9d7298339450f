"""Calls in a text: the same ones, and the same content, wherever the text is cut; what only looks like a call stays text."""

import json
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmrt.models.text.tool_calls import CallReader
from mmrt.tests.settings import examples

LONG = "mcp." + "w" * 124
NAMES = ("weather", "get-time_2", LONG)
Read = tuple[str, list[tuple[str, str]], bool]


def read(*pieces: str) -> Read:
    """Content, calls, and whether there are calls that have all ended."""
    reader, content, calls = CallReader(NAMES), "", list[tuple[str, str]]()
    for reading in [*map(reader.push, pieces), reader.flush()]:
        content += reading.content
        for index, name, arguments in reading.calls:
            if name is not None:
                assert index == len(calls) and not arguments
                calls.append((name, ""))
            else:
                assert index == len(calls) - 1 and arguments
                calls[-1] = calls[-1][0], calls[-1][1] + arguments
    return content, calls, reader.has_calls


def call(arguments: str = "{}", name: str = "weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


HEAD = '<tool_call>\n{"name": "weather", "arguments": '
TRICKY = r'{"a}\"": "</tool_call> {\\", "b": [{}, {"c": "\u00e9 <tool_call>"}]}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (call(), "", [("weather", "{}")]),
        (call(name=LONG), "", [(LONG, "{}")]),
        (f" \n{call(TRICKY)}\n", "", [("weather", TRICKY)]),
        (f"Let me see.\n\n{call()}\n{call(name='get-time_2')}", "Let me see.", [("weather", "{}"), ("get-time_2", "{}")]),
        (f"{call()} and so \n", " and so \n", [("weather", "{}")]),
        (f"a {call()} b {call()}", "a b", [("weather", "{}"), ("weather", "{}")]),
        ('<tool_call>{"name":"weather","arguments":{"a":1}}</tool_call>', "", [("weather", '{"a":1}')]),
        ('<tool_call>\n{ "name" : "weather" ,\n\t"arguments" : {} \n}\n\n</tool_call>', "", [("weather", "{}")]),
        ('<tool_call>\n{"name": "weather", "arguments": {"a": 1}}', "", [("weather", '{"a": 1}')]),
        ('<tool_call>\n{"name": "weather", "arguments": {"a": 1}}\n</tool', "", [("weather", '{"a": 1}')]),
        # broken ones: nothing of the arguments is lost, and nothing behind them
        (call('{"a": [}') + call(), "", [("weather", '{"a": [}'), ("weather", "{}")]),
        (HEAD + '{"a": 1\n</tool_call>\n' + call(), "", [("weather", '{"a": 1\n'), ("weather", "{}")]),
        ('<tool_call>\n{"name": "weather", "arguments": {}\n</tool_call>x', "x", [("weather", "{}")]),
        ('<tool_call>\n{"name": "weather", "arguments": {}, "id": 1}', ', "id": 1}', [("weather", "{}")]),
        ('<tool_call>\n{"name": "weather", "arguments": {}}</toolbox>', "</toolbox>", [("weather", "{}")]),
    ],
)  # fmt: skip
def test_calls(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(text) == (content, calls, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " Hello \n",
        "<tool_call",
        "<tool_call>",
        "a < b, <tool_call> and </tool_call>\n",
        call(name="other"),
        call(name="weather "),
        call("[]"),
        call('"{}"'),
        '<tool_call>\n{"name": "weather"}\n</tool_call>',
        '<tool_call>\n{"arguments": {}, "name": "weather"}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": ',
        f'<tool_call>{" " * 65}{{"name": "weather", "arguments": {{}}}}</tool_call>',
        '```json\n{"name": "weather", "arguments": {}}\n```',
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert read(text) == (text, [], False)
    assert read(f"{text}{call()}") == (text.rstrip(), [("weather", "{}")], True)


def test_a_call_that_is_cut() -> None:
    """Its arguments are there as far as they came, and it counts as not ended."""
    text = call('{"city": "Ul"}')
    for end in range(text.index("{}") if "{}" in text else text.index('{"city"') + 1, text.index("}}")):
        assert read(text[:end]) == ("", [("weather", text[text.index('{"city"') : end])], False)


def test_pieces_come_as_early_as_they_are_certain() -> None:
    reader = CallReader(NAMES)
    text = f"So:\n{call(json.dumps({'city': 'Ulm'}))}"
    seen = [(reading.content, *[(name, arguments) for _, name, arguments in reading.calls]) for reading in map(reader.push, text)]
    shown = [one for one in seen if one != ("",)]
    assert shown[:3] == [("S",), ("o",), (":",)]
    assert shown[3] == ("", ("weather", ""), (None, "{")) and len(shown) == 4 + len('"city": "Ulm"}')


PIECES = [
    "<tool_call>", "</tool_call>", "<tool", "_call>", "\n", " ", "{", "}", '"', "\\", '"name": "weather"', '"name": "no"', ", ",
    '"arguments": ', '"arguments": {', "a", "é😀", "[", '{"name": "weather", "arguments": {', call(), call(TRICKY), call(name="other"),
]  # fmt: skip


@settings(max_examples=examples(300), deadline=None)
@given(parts=st.lists(st.sampled_from(PIECES), max_size=12), cuts=st.lists(st.integers(0, 400), max_size=8))
@example(parts=['<tool_call>{"name": "weather", "arguments": {', "\n", "</tool_call>"], cuts=[46])
def test_cuts_do_not_matter(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    whole = read(text)
    places = sorted({0, len(text), *[cut for cut in cuts if cut < len(text)]})
    assert read(*[text[begin:end] for begin, end in pairwise(places)]) == whole
    assert read(*text) == whole
    if not whole[1]:
        assert whole[0] == text


TEXTS = st.text('abü"\\\n<>{}', max_size=6)
ARGUMENTS = st.dictionaries(TEXTS, TEXTS | st.integers(), max_size=3)


@settings(max_examples=examples(100), deadline=None)
@given(
    calls=st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=4),
    content=TEXTS.map(str.strip),
)
def test_what_is_written_is_read(calls: list[tuple[str, dict[str, object]]], content: str) -> None:
    written = [call(json.dumps(arguments, ensure_ascii=False), name) for name, arguments in calls]
    found, read_calls, ended = read("\n".join([content, *written]))
    assert (found, ended) == (content, True)
    assert [(name, json.loads(arguments)) for name, arguments in read_calls] == calls


def test_many_openings_take_linear_time() -> None:
    text = "<tool_call>{" * 40_000
    assert read(text)[0] == text
