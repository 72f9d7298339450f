"""What ``mmrt up`` prints, where somebody may close the terminal."""

import errno
import io

import pytest

from mmrt.cli.terminal import TerminalReporter, ThoughtView
from mmrt.runtime.environment import Environment


class OpenTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ClosedTerminal(OpenTerminal):
    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_a_closed_terminal_harms_nobody() -> None:
    """The run goes on, or ends in order: it is the supervisor that calls these."""
    reporter = TerminalReporter(ClosedTerminal(), Environment())
    reporter.progress("decode", "stopping", "")
    reporter.progress("decode", "stopped", "")
    reporter.message("stopping")
    reporter.lines("decode", ["the end"])


@pytest.mark.parametrize(
    ("stream", "is_plain", "shown"),
    [(OpenTerminal(), False, "\x1b[2ma\u241bb\x1b[0m\n\n"), (OpenTerminal(), True, "a\u241bb\n\n"), (io.StringIO(), False, "")],
)
def test_thoughts_are_shown_on_a_terminal_alone(stream: io.StringIO, is_plain: bool, shown: str) -> None:
    """Dimmed unless it is to be plain; they do not obey it."""
    view = ThoughtView(stream, is_plain=is_plain)
    view.add("a\x1bb")
    view.end()
    view.end()
    assert stream.getvalue() == shown
