"""What ``mmrt up`` prints, where somebody may close the terminal."""

import errno
import io

from mmrt.cli.terminal import TerminalReporter
from mmrt.runtime.environment import Environment


class ClosedTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_a_closed_terminal_harms_nobody() -> None:
    """The run goes on, or ends in order: it is the supervisor that calls these."""
    reporter = TerminalReporter(ClosedTerminal(), Environment())
    reporter.progress("decode", "stopping", "")
    reporter.progress("decode", "stopped", "")
    reporter.message("stopping")
    reporter.lines("decode", ["the end"])
