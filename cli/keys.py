"""Single keys of a terminal, for the views that are drawn anew until a key ends them."""

import os
import select
import signal
import sys
import termios
import time
import tty
from types import FrameType, TracebackType

_ESCAPE = b"\x1b"


class Keys:
    """A context in which keys come at once and are not shown; without a terminal as standard input there are none.

    SIGTERM leaves it as an exception, so that the terminal is as before; Ctrl-C is a signal that does so anyhow.
    """

    def __enter__(self) -> "Keys":
        self._on_term = signal.signal(signal.SIGTERM, _leave)
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        if self._fd >= 0:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._fd >= 0:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
        signal.signal(signal.SIGTERM, self._on_term)

    def wait_for_end(self, seconds: float) -> bool:
        """Wait so long, or until q or Esc is pressed; return whether one was. Other keys are forgotten."""
        if self._fd < 0:
            time.sleep(seconds)
            return False
        give_up_s = time.monotonic() + seconds
        while select.select([self._fd], [], [], max(0.0, give_up_s - time.monotonic()))[0]:
            pressed = os.read(self._fd, 64)  # of one key or of several; an arrow is Esc and more, at once
            if not pressed or pressed[:1] in (b"q", b"Q") or pressed == _ESCAPE:
                return True
        return False


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
