"""Logs as JSON, one object a line (``logging.format = "json"``): made by actors and the supervisor, read back by ``mmrt logs``.

An object has ``time`` (first, so that lines sort by it), ``level``, ``actor``, ``pid``, ``generation``, ``logger``, ``message``, and
where there are any ``request_id`` and ``exception``.
"""

import datetime
import logging
import re
from collections.abc import Mapping
from typing import Any

import msgspec

MAX_BYTES = 12 << 10  # of an object: the supervisor cuts longer lines
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_BEGIN = '{"time":"'
_TIME_CHARS = len("2026-01-01T00:00:00.000000Z")
_REQUEST_ID = re.compile(r"\b[a-z]+[-_][0-9a-f]{24}(?:\.[0-9]+)?\b")
_encode = msgspec.json.Encoder().encode


def timestamp(time_s: float) -> str:
    """Return UTC to the microsecond, of constant width: lines of several files sort as text."""
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class JsonFormatter(logging.Formatter):
    """Formats the records of a process. ``generations``: of its actors; of several, the thread's name says which one logs."""

    def __init__(self, process: str, generations: Mapping[str, int]) -> None:
        super().__init__()
        self._process = process
        self._generations = generations

    def format(self, record: logging.LogRecord) -> str:
        actor = record.threadName if record.threadName in self._generations else self._process
        exception = record.exc_info and self.formatException(record.exc_info)
        return as_object(
            record.getMessage(),
            time_s=record.created,
            level=record.levelname,
            actor=str(actor),
            pid=record.process,
            generation=self._generations.get(str(actor)),
            logger=record.name,
            exception=exception or None,
        )


def as_object(
    message: str,
    *,
    time_s: float,
    actor: str,
    pid: int | None,
    level: str = "INFO",
    generation: int | None = None,
    logger: str | None = None,
    exception: str | None = None,
) -> str:
    """Return a line of JSON, without what is None. Too long a message loses its end, too long a traceback its beginning."""
    found = _REQUEST_ID.search(message)
    fields: dict[str, Any] = {
        "time": timestamp(time_s),
        "level": level,
        "actor": actor,
        "pid": pid,
        "generation": generation,
        "logger": logger,
        "message": message,
        "request_id": found and found.group(),
        "exception": exception,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    text = _encoded(fields)
    while len(text) > MAX_BYTES:
        excess = len(text) - MAX_BYTES
        name = max(("message", "exception"), key=lambda name: len(fields.get(name, "")))
        kept = max(0, len(fields[name]) - max(excess // 6, 64))  # a character takes up to six bytes
        fields[name] = fields[name][:kept] + "…" if name == "message" else "…" + fields[name][len(fields[name]) - kept :]
        text = _encoded(fields)
    return text.decode()


def _encoded(fields: Mapping[str, Any]) -> bytes:
    try:
        return _encode(fields)
    except UnicodeEncodeError:  # surrogates, as file names that are no UTF-8 have
        return _encode({name: _whole(value) for name, value in fields.items()})


def _whole(value: object) -> object:
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def wrapped(line: str, time_s: float, actor: str, pid: int | None) -> str:
    """Return a line that a process has printed as an object: itself if it is one."""
    return line if is_object(line) else as_object(line, time_s=time_s, actor=actor, pid=pid)


def is_object(line: str) -> bool:
    return line.startswith(_BEGIN) and line.endswith("}")


def time_of(line: str) -> str:
    """Return the time that a line of a log file begins with, in either format."""
    return line[len(_BEGIN) :][:_TIME_CHARS] if line.startswith(_BEGIN) else line.partition(" ")[0]


def readable(line: str) -> list[str]:
    """Return a line of a log file as people read it: those of an object as the text format has them, others as they are."""
    if not is_object(line):
        return [line]
    try:
        fields = _decode(line)
    except (msgspec.MsgspecError, RecursionError):  # the line may be anybody's
        return [line]
    logger = f"{fields['level']} {fields['logger']}: " if "logger" in fields and "level" in fields else ""
    text = f"{logger}{fields.get('message', '')}\n{fields.get('exception', '')}".rstrip("\n")
    return [f"{fields['time']} {one}" for one in text.split("\n")]


def log_as_json(process: str, generations: Mapping[str, int]) -> None:
    """Let this process log so from now on."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter(process, generations))
