"""Lines from a terminal, with editing, completion and a history that outlives the program; or from a pipe. By readline, where it is."""

import glob
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

HISTORY_LINES = 1000
Reader = Callable[[str], str | None]


def piped_lines(_: str) -> str | None:
    """Return the next line of standard input, without its end; None at the end. Nobody is prompted."""
    line = sys.stdin.buffer.readline().decode(errors="replace")
    return line.rstrip("\r\n") if line else None


def terminal_lines(history: Path, commands: Sequence[str]) -> Reader:
    """Return a reader of lines that prompts, and keeps what was typed in the file ``history``, which is its user's alone.

    ``commands``: begin with a slash; the Tab key completes them, and names of files after them.
    """
    remember = _prepare(history, commands)

    def read(prompt: str) -> str | None:
        if not sys.stdout.isatty():  # input() would print the prompt among the answers
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        try:
            line = input(prompt)
        except EOFError:
            return None
        if line.strip():
            remember()
        return line

    return read


def _prepare(history: Path, commands: Sequence[str]) -> Callable[[], None]:
    """Set readline up; return what keeps the last line. Without readline, or a place for the file, lines are kept nowhere."""
    try:
        import readline
    except ImportError:
        return lambda: None
    readline.set_completer_delims(" \t\n")
    readline.set_completer(lambda text, at: _completion(readline.get_line_buffer(), text, at, commands))
    readline.parse_and_bind("tab: complete")
    readline.parse_and_bind("set enable-bracketed-paste on")  # several pasted lines are one question
    try:
        history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(history, os.O_RDONLY | os.O_CREAT, 0o600))
        readline.read_history_file(history)
        if readline.get_current_history_length() > HISTORY_LINES:
            readline.set_history_length(HISTORY_LINES)
            readline.write_history_file(history)
    except OSError:
        return lambda: None

    def remember() -> None:
        with suppress(OSError):
            readline.append_history_file(1, history)

    return remember


def _completion(line: str, text: str, at: int, commands: Sequence[str]) -> str | None:
    """Return the completion number ``at`` of the word ``text`` of a line."""
    if not line.startswith("/"):
        found: Sequence[str] = ()
    elif line == text:
        found = [f"{command} " for command in commands if command.startswith(text)]
    else:
        paths = sorted(glob.glob(f"{glob.escape(os.path.expanduser(text))}*"))
        found = [f"{path}/" if os.path.isdir(path) else path for path in paths]
    return found[at] if at < len(found) else None
