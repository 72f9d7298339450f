"""How ``mmrt chat`` shows an answer: wrapped at words, with Markdown, block by block; and that all of it is shown."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mmrt.cli.answer_view import Rendered, Wrapped, split_blocks

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
MARKDOWN = """\
# Title

Some **bold** text
in two lines.

1. one

2. two

   more of two

| a | b |
|---|---|
| 1 | 2 |

```python
x = 1

y = 2
```

end"""


def rendered(text: str, step: int, width: int = 40, height: int = 12) -> list[str]:
    """The lines on the screen once the answer is over, as a terminal would have them."""
    out = io.StringIO()
    view = Rendered(Console(file=out, force_terminal=True, width=width, height=height))
    for at in range(0, len(text), step):
        view.add(text[at : at + step])
    view.end()
    return screen(out.getvalue())


def screen(output: str) -> list[str]:
    """What a terminal shows after it has obeyed rich's escape sequences: up, erase the line, to its beginning."""
    lines, row, column = [""], 0, 0
    for piece in re.split(r"(\x1b\[[0-9;?]*[a-zA-Z]|\r|\n)", output):
        if piece == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif piece == "\r":
            column = 0
        elif piece == "\x1b[1A":
            row -= 1
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif not ESCAPES.fullmatch(piece):
            lines[row] = lines[row][:column].ljust(column) + piece + lines[row][column + len(piece) :]
            column += len(piece)
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_markdown_is_shown_block_by_block(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmrt.cli.answer_view._REDRAW_S", 0.0)
    shown = rendered(MARKDOWN, step)
    text = "\n".join(shown)
    assert [line.strip() for line in shown[:4]] == ["Title", "", "Some bold text", "in two lines."]
    assert re.search(r" 1 one\n+ 2 two\n+   more of two\n", text)
    assert "**" not in text and "```" not in text and "|" not in text
    assert " x = 1\n\n y = 2\n\nend" in text, "one empty line between blocks"


def test_what_looks_like_html_is_shown() -> None:
    shown = "\n".join(rendered("<svg>\n<b>x</b>\n</svg>\n\n<!-- c -->\n\nA <i>b</i> [l](http://h/p)", 5))
    assert "<svg>\n<b>x</b>\n</svg>\n\n<!-- c -->\n\nA <i>b</i> l (http://h/p)" in shown


def test_another_s_text_does_not_obey_the_terminal() -> None:
    assert rendered("a\x1b[2Jb\x07", 2)[0] == "a\u241b[2Jb\u2407"


def test_a_block_that_is_taller_than_the_terminal_is_shown_whole_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmrt.cli.answer_view._REDRAW_S", 0.0)
    code = "\n".join(f"line {number}" for number in range(30))
    assert [line.strip() for line in rendered(f"```\n{code}\n```", 7)[:30]] == code.split("\n")


@given(st.text(alphabet="ab `~\n#-1.\u4e2d", max_size=80), st.integers(1, 9))
def test_blocks_lose_nothing(text: str, step: int) -> None:
    done, rest = "", ""
    for at in range(0, len(text), step):
        complete, rest = split_blocks(rest + text[at : at + step])
        done += complete
    assert done + rest == text


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("a\n", ""),
        ("a\n\n", ""),
        ("a\n\nb", "a\n\n"),
        ("1. a\n\n   b", ""),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("~~~~\n```\n\nb\n~~~~\n\nc", "~~~~\n```\n\nb\n~~~~\n\n"),
        ("```` x\n```\n\nb", ""),
    ],
)
def test_a_block_is_complete_once_the_next_begins(text: str, complete: str) -> None:
    assert split_blocks(text) == (complete, text[len(complete) :])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("the quick brown fox jumps", "the quick\nbrown fox\njumps\n"),
        ("abcdefghijklmn op", "abcdefghijklmn\nop\n"),
        ("aaaaa bbbb cc  dd", "aaaaa bbbb\ncc  dd\n"),
        ("    four\nfive  \n", "    four\nfive\n\n"),
        ("    seven77", "seven77\n"),
        ("a\nb\n\nc d", "a\nb\n\nc d\n"),
        ("\u4e2d\u6587\u4e2d \u6587\u4e2d\u6587", "\u4e2d\u6587\u4e2d\n\u6587\u4e2d\u6587\n"),
        ("\x1b[31m", "\u241b[31m\n"),
        ("", ""),
    ],
)
@pytest.mark.parametrize("step", [1, 4, 100])
def test_plain_terminals_wrap_at_words(text: str, shown: str, step: int, capsys: pytest.CaptureFixture[str]) -> None:
    view = Wrapped(10)
    for at in range(0, len(text), step):
        view.add(text[at : at + step])
    view.end()
    printed = capsys.readouterr().out
    assert printed == shown
