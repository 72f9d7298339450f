"""Output of ``mmrt up`` and ``mmrt logs``: prefixed lines, coloured where a terminal shows them. Plain columns of other commands.

Runs in the supervisor too, so neither rich nor threads here.
"""

import os
import shutil
import time
from collections.abc import Collection, Sequence
from typing import TextIO

from ..runtime.environment import Environment
from ..runtime.process.json_log import as_object
from ..runtime.stage_table import STAGES, SUPERVISOR, stage_of

_COLOURS = dict(zip(STAGES, (36, 33, 32, 35, 34, 96, 92, 95), strict=False))
_SHOWN = {code: chr(0x2400 + code) for code in range(32)} | {0x7F: "\u2421"} | {code: "\ufffd" for code in range(0x80, 0xA0)}
_SHOWN |= {ord("\t"): "\t", ord("\n"): "\n", ord("\r"): ""}
_WIDTH = max(map(len, STAGES))
_QUIET = ("stopping", "stopped")
_PROGRESS_S = 2.0  # between progress lines of one actor where they cannot be overwritten


def print_columns(rows: Sequence[Sequence[str]], left: Collection[int]) -> None:
    """Print cells below each other, headings first: the columns ``left`` to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        print("  ".join(cell.ljust(width) if at in left else cell.rjust(width) for at, (cell, width) in enumerate(cells)).rstrip())


def size(num_bytes: float) -> str:
    """Bytes as a hub's pages show them: in powers of ten."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def printable(text: str) -> str:
    """Return a text without control characters that a terminal would obey: another's text must not move its cursor or set its title."""
    return text.translate(_SHOWN)


class ThoughtView:
    """Shows a model's thoughts as they come, dimmed, where a stream is a terminal. They are no part of an answer: nothing else gets
    them. ``is_plain``: without escape sequences."""

    def __init__(self, stream: TextIO, *, is_plain: bool) -> None:
        self._stream, self._is_plain = stream, is_plain
        self._has_shown = False

    def add(self, thoughts: str) -> None:
        if self._stream.isatty():
            self._has_shown = True
            shown = printable(thoughts)
            print(shown if self._is_plain else f"\x1b[2m{shown}\x1b[0m", end="", file=self._stream, flush=True)

    def end(self) -> None:
        """Begin a new paragraph if thoughts were shown since the last call."""
        if self._has_shown:
            self._has_shown = False
            print("\n", file=self._stream, flush=True)


class Palette:
    """Formats lines for one stream: with colours if it is a terminal that wants them."""

    def __init__(self, stream: TextIO, environment: Environment) -> None:
        self.is_terminal = stream.isatty() and not environment.plain_output

    def paint(self, text: str, code: int) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.is_terminal else text

    def prefix(self, actor: str) -> str:
        code = _COLOURS.get(stage_of(actor), 90)
        return self.paint(f"{actor:>{_WIDTH}} |", code)

    def line(self, actor: str, line: str) -> str:
        return f"{self.prefix(actor)} {line}"


class TerminalReporter:
    """The supervisor's Reporter in the foreground. Progress overwrites one line, or prints a line now and then."""

    def __init__(self, stream: TextIO, environment: Environment) -> None:
        self._stream = stream
        self._palette = Palette(stream, environment)
        self._transient = False
        self._shown: dict[str, tuple[str, float]] = {}  # actor -> state, when its progress was last shown

    def lines(self, actor: str, lines: Sequence[str]) -> None:
        self._print(*(self._palette.line(actor, line) for line in lines))

    def progress(self, actor: str, state: str, status: str) -> None:
        now_s = time.monotonic()
        old_state, shown_s = self._shown.get(actor, ("", 0.0))
        text = status if status.startswith(state) else f"{state}: {status}" if status else state
        if self._palette.is_terminal:
            width = (shutil.get_terminal_size().columns or 80) - _WIDTH - 4
            self._write(f"{self._palette.prefix(actor)} {self._palette.paint(text[: max(1, width)], 2)}")
            self._transient = True
        elif state not in _QUIET and (state != old_state or now_s - shown_s > _PROGRESS_S):
            self._print(self._palette.line(actor, text))
        else:
            return
        self._shown[actor] = state, now_s

    def message(self, text: str) -> None:
        self._print(self._palette.line("mmrt", text))

    def ready(self, endpoint: str, page: str, seconds: float) -> None:
        """Say where to go: people to the page, programs to the API."""
        ready = self._palette.paint("ready", 32)
        opened = f"open {page} in a browser; " if page else ""
        self._print(self._palette.line("mmrt", f"{ready} after {seconds:.1f} s: {opened}OpenAI's API is at {endpoint}/v1"))

    def failed(self, reason: str, tail: Sequence[str]) -> None:
        """In the foreground the tail has been printed as it came."""
        self._print(self._palette.line("mmrt", self._palette.paint(f"error: {reason}", 31)))

    def _print(self, *lines: str) -> None:
        self._write("".join(f"{line}\n" for line in lines))

    def _write(self, text: str) -> None:
        try:
            self._clear()
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            return  # the terminal is gone; the run and its log files are not

    def _clear(self) -> None:
        if self._transient:
            self._stream.write("\r\x1b[2K")
            self._transient = False


class JsonReporter:
    """The supervisor's Reporter in the foreground where logs are JSON: objects, without progress."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def lines(self, actor: str, lines: Sequence[str]) -> None:
        """Print lines that are objects."""
        try:
            self._stream.write("".join(f"{line}\n" for line in lines))
            self._stream.flush()
        except OSError:
            return  # the reader is gone; the run and its log files are not

    def progress(self, actor: str, state: str, status: str) -> None:
        pass

    def message(self, text: str, level: str = "INFO") -> None:
        self.lines(SUPERVISOR, [as_object(text, time_s=time.time(), actor=SUPERVISOR, pid=os.getpid(), level=level)])

    def ready(self, endpoint: str, page: str, seconds: float) -> None:
        opened = f"; its page is at {page}" if page else ""
        self.message(f"ready after {seconds:.1f} s: {endpoint}/v1{opened}")

    def failed(self, reason: str, tail: Sequence[str]) -> None:
        self.message(reason, "ERROR")
