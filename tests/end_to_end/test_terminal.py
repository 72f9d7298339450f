"""``mmrt chat`` at a real terminal and over a pipe, and the commands that ``mmrt examples`` prints, with a real run."""

import os
import select
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmrt.tests.end_to_end.conftest import MMRT, Server

CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
PASTE, PASTED = "\x1b[200~", "\x1b[201~"  # a terminal marks so what is pasted
PICTURE = Path(__file__).parents[2] / "examples" / "shapes.png"
WAIT_S = 40.0
# Its standard input becomes the terminal that controls it, so that Ctrl-C reaches it.
CONTROLLED = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


class Terminal:
    """A chat whose input and output are a terminal."""

    def __init__(self, server: Server, *arguments: str) -> None:
        self._master, slave = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLED, *MMRT, "chat", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**server.environment, "TERM": "xterm"},
            start_new_session=True,
        )
        os.close(slave)
        self._seen = ""
        self._at = 0

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, text: str) -> str:
        """Wait for a text; return what came before it."""
        deadline = time.monotonic() + WAIT_S
        while (at := self._seen.find(text, self._at)) < 0:
            self._read(deadline, text)
        before, self._at = self._seen[self._at : at], at + len(text)
        return before

    def until_more(self, num_chars: int) -> None:
        """Wait for so much output."""
        deadline = time.monotonic() + WAIT_S
        while len(self._seen) < self._at + num_chars:
            self._read(deadline, f"{num_chars} characters")
        self._at += num_chars

    def _read(self, deadline: float, what: str) -> None:
        assert select.select([self._master], [], [], max(0, deadline - time.monotonic()))[0], f"no {what!r} in {self._seen!r}"
        self._seen += os.read(self._master, 65536).decode(errors="replace")

    def end(self) -> int:
        """Press Ctrl-D; return the exit status."""
        self.type(CTRL_D)
        deadline = time.monotonic() + WAIT_S
        try:
            while True:
                self._read(deadline, "end")
        except OSError:  # nobody has the terminal any more
            return self.process.wait(WAIT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def chat(server: Server) -> Iterator[Terminal]:
    terminal = Terminal(server, "--temperature", "0", "--max-tokens", "8")
    terminal.until(">>> ")
    terminal.type("/set ignore_eos true\n")
    terminal.until("ignore_eos = true")
    terminal.until(">>> ")
    yield terminal
    terminal.close()


def test_a_conversation(chat: Terminal, server: Server) -> None:
    chat.type(f"/image {PICTURE}\n")
    chat.until(f"attached: {PICTURE}")
    for question in ("What is it?", "And then?", "/again"):
        chat.until(">>> ")
        chat.type(f"{question}\n")
        chat.until(question)
        assert "error" not in chat.until("cut off at the limit of its length")
    chat.until(">>> ")
    chat.type(f"{PASTE}Two\rlines?{PASTED}\n")
    chat.until("cut off at the limit of its length")
    assert "cut off" not in chat.until(">>> "), "what is pasted is one question"
    assert chat.end() == 0
    server.wait_until_empty()
    history = Path(server.environment["XDG_STATE_HOME"]) / "mmrt" / "chat_history"
    assert history.read_text().splitlines()[-5:] == ["What is it?", "And then?", "/again", "Two", "lines?"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_ctrl_c_stops_an_answer_and_not_the_chat(chat: Terminal, server: Server) -> None:
    chat.type("/set max_tokens 30000\n")
    chat.until("max_tokens = 30000")
    chat.until(">>> ")
    chat.type("Go on and on.\n")
    chat.until("Go on and on.\r\n")
    chat.until_more(200)
    chat.type(CTRL_C)
    chat.until("(stopped)\r\n")
    server.wait_until_empty()  # the server has heard of it
    chat.until(">>> ")
    chat.type(f"half a line{CTRL_C}")
    chat.until("(Ctrl-D ends the chat)")
    chat.until(">>> ")
    chat.type("/set max_tokens 8\n")
    chat.until(">>> ")
    chat.type(f"{UP}{UP}\n")  # the history
    chat.until("Go on and on.\r\n")
    chat.until("cut off at the limit of its length")
    chat.until(">>> ")
    assert chat.end() == 0


def test_errors_leave_the_chat_as_it_was(chat: Terminal, server: Server) -> None:
    chat.type("/set max_tokens -2\n")
    chat.until(">>> ")
    chat.type("Hello\n")
    chat.until("error: 400: max_tokens")
    chat.until(">>> ")
    chat.type("/imag x.png\n")
    chat.until("error: no command /imag; did you mean /image?")
    chat.until(">>> ")
    chat.type("/set max_tokens 8\n")
    chat.until(">>> ")
    chat.type("/again\n")
    chat.until("cut off at the limit of its length")
    chat.until(">>> ")
    assert chat.end() == 0


def test_over_a_pipe(server: Server) -> None:
    lines = f"/set ignore_eos true\nHello\n/image {PICTURE} What is it?\n"
    command = [*MMRT, "chat", "--max-tokens", "4", "--temperature", "0"]
    done = subprocess.run(command, env=server.environment, input=lines, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr.count("cut off at the limit") == 2 and done.stdout and ">>>" not in done.stdout
    lines = "/nonsense\nHello\n"
    done = subprocess.run(command, env=server.environment, input=lines, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "error: no command /nonsense" in done.stderr and done.stdout


def test_the_printed_examples_run(server: Server, tmp_path: Path) -> None:
    """All of them, as one script."""
    printed = server.mmrt("examples")
    assert printed.returncode == 0 and server.url in printed.stdout
    environment = {**server.environment, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", printed.stdout], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, printed.stdout + done.stderr
    assert '"error"' not in done.stdout and ".py: ok (version" in done.stdout, done.stdout
    assert "decode: generation" in done.stdout and done.stdout.rstrip().endswith("data: [DONE]"), done.stdout
    assert list(tmp_path.iterdir()) == []
    server.wait_until_empty()


def test_examples_of_some_topics(server: Server) -> None:
    printed = server.mmrt("examples", "schema", "curl").stdout
    assert printed.index("json_schema") < printed.index("server-sent events") and "policy" not in printed
    assert sys.executable not in printed
