"""Show an answer while it comes: as it is in a pipe, wrapped at words on a plain terminal, else with its Markdown.

Another's text must not obey the terminal, so its control characters are shown; neither HTML nor links are more than text.
"""

import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from .terminal import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live
    from rich.markdown import Markdown
    from rich.segment import Segment

_REDRAW_S = 0.06
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_MARGIN_LINES = 2  # that a block which grows leaves free: one that reaches the last line would scroll


class View(Protocol):
    """Takes the parts of one answer. ``end`` is called once, also of an answer that broke off."""

    def add(self, text: str) -> None: ...
    def end(self) -> None: ...


def view_answer(*, is_plain: bool) -> View:
    """Return the view of an answer on standard output. ``is_plain``: without escape sequences."""
    if not sys.stdout.isatty():
        return AsItIs()
    return Wrapped(shutil.get_terminal_size().columns) if is_plain else Rendered()


class AsItIs:
    """The text as it is, and the end of its last line."""

    _is_empty = True

    def add(self, text: str) -> None:
        print(text, end="", flush=True)
        self._is_empty = self._is_empty and not text

    def end(self) -> None:
        if not self._is_empty:
            print(flush=True)


class Wrapped(AsItIs):
    """Breaks lines between words, for a terminal of ``width`` columns. A word is printed once the next one begins.

    The blanks in front of it come with it: behind a full line they would begin another.
    """

    def __init__(self, width: int) -> None:
        self._width = max(1, width)
        self._column = 0
        self._blanks = ""
        self._word = ""

    def add(self, text: str) -> None:
        super().add("".join(self._broken(printable(text))))

    def end(self) -> None:
        super().add(self._placed())
        super().end()

    def _broken(self, text: str) -> Iterator[str]:
        for piece in re.split(r"(\s)", text):
            if not piece.isspace():
                self._word += piece
                continue
            yield self._placed()
            if piece == "\n":
                self._column, self._blanks = 0, ""
                yield piece
            else:
                self._blanks += piece

    def _placed(self) -> str:
        """Return the word behind its blanks, or without them on a line of its own if this one has no room for both."""
        from rich.cells import cell_len

        if not self._word:
            return ""
        blanks, word = self._blanks, self._word
        self._blanks = self._word = ""
        width = cell_len(word)
        if self._column + len(blanks) + width > self._width:
            start = "\n" if self._column else ""
            self._column = width
            return start + word
        self._column += len(blanks) + width
        return blanks + word


class Rendered:
    """Shows Markdown. Blocks are printed when the next one begins; the one that grows is drawn again and again."""

    def __init__(self, console: "Console | None" = None) -> None:
        from rich.console import Console

        self._console = console or Console(file=sys.stdout)
        self._text = ""  # of the block that grows
        self._live: Live | None = None
        self._drawn_s = 0.0
        self._is_first = True

    def add(self, text: str) -> None:
        self._text += printable(text)
        done, self._text = split_blocks(self._text)
        if done.strip():
            self._print(done)
        now_s = time.monotonic()
        if self._text.strip() and now_s - self._drawn_s > _REDRAW_S:
            self._draw()
            self._drawn_s = now_s

    def end(self) -> None:
        if self._text.strip():
            self._print(self._text)
        self._stop()
        self._text = ""

    def _print(self, text: str) -> None:
        self._stop()
        self._console.print(_Block(text, self._is_first), end="")
        self._is_first = False

    def _draw(self) -> None:
        from rich.live import Live

        block = _Block(self._text, self._is_first, max(1, self._console.height - _MARGIN_LINES))
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        self._live.update(block, refresh=True)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class _Block:
    """A block of Markdown for rich, after an empty line unless it is the first, without empty lines and spaces at its ends.
    ``num_lines``: so many of its last lines; 0: all."""

    def __init__(self, text: str, is_first: bool, num_lines: int = 0) -> None:
        self._markdown = _markdown(text)
        self._is_first = is_first
        self._num_lines = num_lines

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.segment import Segment

        lines = [_stripped(line) for line in console.render_lines(self._markdown, options, pad=False)]
        while lines and not lines[0]:
            del lines[0]
        while lines and not lines[-1]:
            del lines[-1]
        shown = lines if self._is_first else [[], *lines]
        for line in shown[-self._num_lines :]:
            yield from line
            yield Segment.line()


def _stripped(line: "list[Segment]") -> "list[Segment]":
    """Return a line without the spaces that fill it up."""
    while line and not line[-1].text.strip():
        line = line[:-1]
    return line and [*line[:-1], line[-1]._replace(text=line[-1].text.rstrip())]


def split_blocks(text: str) -> tuple[str, str]:
    """Divide Markdown that still grows into blocks that are complete, and the rest (pure).

    A block ends with an empty line outside of fenced code, unless the next line is indented and may belong to a list.
    """
    end, at, fence, is_after_empty = 0, 0, "", False
    for line in text.splitlines(keepends=True):
        if is_after_empty and not fence and line.strip() and not line[0].isspace():
            end = at
        found = _FENCE.match(line)
        if found and not fence:
            fence = found[1]
        elif found and found[1].startswith(fence) and not line.strip().strip(fence[0]):
            fence = ""
        is_after_empty = not line.strip() and line.endswith("\n")
        at += len(line)
    return text[:end], text[end:]


def _markdown(text: str) -> "Markdown":
    """Return Markdown as rich shows it: HTML as the text that it is, line breaks as they were written, links with their address."""
    from markdown_it import MarkdownIt
    from rich.markdown import Markdown

    parsed = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).parse(text)
    for inline in _children(parsed):
        if inline.type == "softbreak":
            inline.type = "hardbreak"
    shown = Markdown("", code_theme="ansi_dark", hyperlinks=False)
    shown.markup, shown.parsed = text, parsed
    return shown


def _children(tokens: Iterable[Any]) -> Iterator[Any]:
    for token in tokens:
        yield from token.children or ()
