"""Logs as JSON: one object a line, whatever is logged, and back to text."""

import json
import logging
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.runtime.process.json_log import MAX_BYTES, JsonFormatter, as_object, is_object, readable, time_of, wrapped

DEEP = '{"time":"x","a":' + "[" * 4000 + "]" * 4000 + "}"

ID = "chatcmpl-" + "0a1b" * 6


def record(message: str, *args: object, error: BaseException | None = None) -> logging.LogRecord:
    exception = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("mmrt.actors.decode", logging.WARNING, "f.py", 1, message, args, exception)
    made.created, made.process = 1_800_000_000.25, 77
    return made


def test_a_record_is_one_object() -> None:
    line = JsonFormatter("decode", {"decode": 3}).format(record("%s: a gap\nof %d", ID, 4))
    assert "\n" not in line and is_object(line)
    assert list(json.loads(line).items()) == [
        ("time", "2027-01-15T08:00:00.250000Z"),
        ("level", "WARNING"),
        ("actor", "decode"),
        ("pid", 77),
        ("generation", 3),
        ("logger", "mmrt.actors.decode"),
        ("message", f"{ID}: a gap\nof 4"),
        ("request_id", ID),
    ]
    assert readable(line) == [
        f"2027-01-15T08:00:00.250000Z WARNING mmrt.actors.decode: {ID}: a gap",
        "2027-01-15T08:00:00.250000Z of 4",
    ]


def test_in_a_shared_process_the_thread_says_which_actor_logs() -> None:
    formatter, found = JsonFormatter("decode", {"prefill": 2, "decode": 3}), []

    def log() -> None:
        found.append(json.loads(formatter.format(record("hello"))))

    thread = threading.Thread(target=log, name="prefill")
    thread.start()
    thread.join()
    log()
    assert [(one["actor"], one["generation"]) for one in found] == [("prefill", 2), ("decode", 3)]


def test_a_traceback_is_in_its_object_and_loses_its_beginning_if_it_is_too_long() -> None:
    def fail(depth: int, text: str) -> None:
        if not depth:
            raise ValueError(text)
        fail(depth - 1, text)

    for depth, text in ((1, "no"), (30, "x" * 20_000 + " the end"), (1, "\x00" * 9000 + " the end")):
        try:
            fail(depth, text)
        except ValueError as error:
            line = JsonFormatter("decode", {}).format(record("decode failed", error=error))
        fields = json.loads(line)
        assert fields["message"] == "decode failed" and fields["exception"].endswith(text[-8:]) and "generation" not in fields
        assert len(line.encode()) <= MAX_BYTES
    assert readable(line)[0].endswith("WARNING mmrt.actors.decode: decode failed") and readable(line)[-1].endswith("the end")


@given(st.text(st.characters(), max_size=200), st.integers(1, 200))
def test_any_message_makes_an_object_of_bounded_size(text: str, times: int) -> None:
    line = as_object(text * times, time_s=0.0, actor="video", pid=1)
    assert len(line.encode()) <= MAX_BYTES and "\n" not in line
    fields = json.loads(line)
    assert fields["actor"] == "video" and time_of(line) == fields["time"] == "1970-01-01T00:00:00.000000Z"
    if text.isascii() and len(text) * times < 1000:
        assert fields["message"] == text * times


def test_what_else_a_process_prints() -> None:
    line = wrapped("Fatal Python error: Segmentation fault", 0.0, "video", 5)
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.000000Z",
        "level": "INFO",
        "actor": "video",
        "pid": 5,
        "message": "Fatal Python error: Segmentation fault",
    }
    assert wrapped(line, 1.0, "video", 5) == line, "an object stays as it is"
    assert readable(line) == ["1970-01-01T00:00:00.000000Z Fatal Python error: Segmentation fault"]


@pytest.mark.parametrize("line", ["plain", "2026-11-25T14:23:31.573672Z INFO a: b", '{"time":"cut', '{"time":"x",}', DEEP, "{}", ""])
def test_other_lines_are_shown_as_they_are(line: str) -> None:
    assert readable(line) == [line]
