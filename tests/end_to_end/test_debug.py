"""``mmrt debug`` in a terminal of the test's own: breakpoints in mid-stream, and every way to leave, none of which changes a token."""

import ast
import contextlib
import os
import pty
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mmrt.tests.end_to_end.conftest import MMRT, Server, also_slow

PROMPT = "A long story, please."
LONG = {"max_tokens": 120, "extra_body": {"ignore_eos": True}}
PDB = "(Pdb) "
TIMEOUT_S = 40.0


class Terminal:
    """A command with a terminal of its own."""

    def __init__(self, server: Server, *arguments: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execve(MMRT[0], [*MMRT, *arguments], {**server.environment, "TERM": "dumb"})
        self._unread = ""
        self._status: int | None = None

    def expect(self, text: str) -> str:
        """Everything up to and with ``text``, which must come."""
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self._unread:
            assert select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0], f"no {text!r} in {self._unread!r}"
            try:
                data = os.read(self._fd, 4096)
            except OSError:  # nobody has the other end open any more
                data = b""
            assert data, f"no {text!r} in {self._unread!r}, and it has ended"
            self._unread += data.decode(errors="replace")
        found, _, self._unread = self._unread.partition(text)
        return found + text

    def type(self, line: str) -> None:
        os.write(self._fd, f"{line}\n".encode())

    def press(self, key: str) -> None:
        os.write(self._fd, key.encode())

    def command(self, line: str) -> str:
        """Type a pdb command that comes back to the prompt."""
        self.type(line)
        return self.expect(PDB)

    def hang_up(self) -> None:
        """Close the terminal."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def wait(self) -> int:
        """The exit status, or minus the signal."""
        if self._status is None:
            deadline = time.monotonic() + TIMEOUT_S
            while (ended := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
                assert time.monotonic() < deadline, f"process {self.pid} does not end"
                if self._fd >= 0 and select.select([self._fd], [], [], 0.02)[0]:
                    with contextlib.suppress(OSError):  # what nobody reads would keep it waiting
                        self._unread += os.read(self._fd, 4096).decode(errors="replace")
            self._status = os.waitstatus_to_exitcode(ended[1])
        return self._status

    def close(self) -> None:
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()
        self.hang_up()


@pytest.fixture(scope="module")
def expected(own: Server) -> list[int]:
    return own.chat(PROMPT, **LONG)[1]


@pytest.fixture
def debug(own: Server) -> Iterator[Callable[..., Terminal]]:
    """Start ``mmrt debug``, to its first prompt if it has one; the supervised process serves again at the end."""
    terminals: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        terminals.append(Terminal(own, "debug", *arguments))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.close()
    own.wait(
        lambda status: bool(status["ready"]) and not any("debugged" in found["status"] for found in status["actors"]), "the old order"
    )


class Answer(threading.Thread):
    """A stream that is read in the background."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.ids: list[int] = []
        self.error: BaseException | None = None
        self._server = server
        self.start()

    def run(self) -> None:
        try:
            self.ids = self._server.chat(PROMPT, **LONG)[1]
        except Exception as error:
            self.error = error

    def result(self) -> list[int]:
        self.join(TIMEOUT_S)
        assert self.error is None, self.error
        return self.ids


def state(server: Server, name: str) -> tuple[str, str, int]:
    """(state, status, pid)."""
    return next((found["state"], found["status"], found["pid"]) for found in server.status()["actors"] if found["name"] == name)


def wait_for(server: Server, name: str, wanted: str) -> None:
    server.wait(lambda status: state(server, name)[0] == wanted, f"{name} {wanted}")


@pytest.mark.parametrize(
    ("actor", "where"),
    [
        ("decode", "RunningSet.step"),
        *also_slow(
            ("prefill", "actors/prefill.py:{execute}"),
            ("detokenizer", "detokenizer.py:{step}"),
            ("controller", "Serving._receive"),
            ("gateway", "completions.py:{answer}"),
        ),
    ],
)
def test_a_breakpoint_in_mid_stream(
    own: Server, own_source: Path, expected: list[int], debug: Callable[..., Terminal], actor: str, where: str
) -> None:
    terminal = debug(actor)
    first = terminal.expect(PDB)
    assert f"{actor}: pid {terminal.pid}, before its start" in first and "-> " in first
    before = state(own, actor)
    assert before[:2] == ("active", f"about to be debugged by pid {terminal.pid}")
    assert own.chat(PROMPT, **LONG)[1] == expected, "the supervised process serves until then"
    assert "Breakpoint 1 at" in terminal.command(f"b {_with_line(own_source, where)}")
    terminal.type("c")
    wait_for(own, actor, "debugged")
    answer = Answer(own)
    terminal.expect(PDB)
    assert state(own, actor) == ("debugged", f"debugged by pid {terminal.pid}", terminal.pid)
    assert actor in terminal.command("w") or actor in terminal.command("p __name__")
    terminal.command("cl 1")
    terminal.type("c")
    assert answer.result() == expected
    terminal.press("\x03")
    assert "Program interrupted" in terminal.expect(PDB)
    terminal.type("q")
    assert f"{actor}: the supervised process takes over" in terminal.expect("over")
    assert terminal.wait() == 0
    own.wait(lambda status: state(own, actor)[0] == "active" and bool(status["ready"]), "the supervised process")
    assert own.chat(PROMPT, **LONG)[1] == expected


def _with_line(source: Path, where: str) -> str:
    """Replace {name} by the number of the first line that the function of this name executes in the file."""
    file_name, _, function = where.rstrip("}").partition(":{")
    if not function:
        return where
    file = next(path for path in source.rglob(Path(file_name).name) if path.match(file_name))
    nodes = ast.walk(ast.parse(file.read_text()))
    body = next(node.body for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function)
    return f"{file_name}:{body[1].lineno if isinstance(body[0], ast.Expr) else body[0].lineno}"


@pytest.mark.parametrize("way", also_slow("kill -9", "quit in mid-step", "Ctrl-D", "closed terminal"))
def test_every_way_to_leave_gives_the_role_back(own: Server, expected: list[int], debug: Callable[..., Terminal], way: str) -> None:
    terminal = debug("decode", "-c", "b RunningSet.step", "-c", "c")
    wait_for(own, "decode", "debugged")
    answer = Answer(own)
    terminal.expect(PDB)
    if way == "kill -9":
        os.kill(terminal.pid, signal.SIGKILL)
    elif way == "Ctrl-D":
        terminal.press("\x04")
    elif way == "closed terminal":
        terminal.hang_up()
    else:
        terminal.type("q")
    terminal.wait()
    assert answer.result() == expected
    wait_for(own, "decode", "active")
    assert state(own, "decode")[2] != terminal.pid


@pytest.mark.slow
def test_a_breakpoint_in_the_source(own: Server, own_source: Path, expected: list[int], debug: Callable[..., Terminal]) -> None:
    file = own_source / "actors" / "decode" / "running_set.py"
    before = file.read_text()
    lines = before.splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if "batch = self._current_batch()" in line)
    indent = lines[at].partition("batch")[0]
    try:
        file.write_text("".join([*lines[: at + 1], f"{indent}breakpoint()\n", *lines[at + 1 :]]))
        assert own.mmrt("restart", "decode").returncode == 0
        assert own.chat(PROMPT, **LONG)[1] == expected
        log = own.mmrt("logs", "decode").stdout
        assert log.count(f"running_set.py:{at + 2}: mmrt debug decode stops there") == 1, "once, and nothing else happens"
        terminal = debug("decode", "--no-pdb")
        assert "breakpoint() and exceptions stop it" in terminal.expect("ends it.")
        wait_for(own, "decode", "debugged")
        answer = Answer(own)
        assert "running_set.py" in terminal.expect(PDB)
        assert "batch" in terminal.command("p 'batch', batch.members")
        file.write_text(before)
        terminal.type("q")  # the standby behind it was started with the breakpoint, which it passes by
        terminal.wait()
        assert answer.result() == expected
    finally:
        file.write_text(before)
    assert own.mmrt("restart", "decode").returncode == 0


def test_an_exception_is_looked_at(own: Server, own_source: Path, debug: Callable[..., Terminal]) -> None:
    file = own_source / "actors" / "prefill.py"
    before = file.read_text()
    old = "assert isinstance(plan, Prefill)\n"
    assert old in before
    try:
        fails = (
            "if __import__('sys').modules['__main__'].__spec__.name == 'mmrt.runtime.observe.debugger': raise RuntimeError('looked at')"
        )
        file.write_text(before.replace(old, f"{old}        {fails}\n"))
        terminal = debug("prefill", "-c", "c")
        wait_for(own, "prefill", "debugged")
        answer = Answer(own)
        seen = terminal.expect(PDB)
        assert "RuntimeError: looked at" in seen and "prefill: post-mortem" in seen
        assert "Prefill(" in terminal.command("p plan")
        terminal.type("q")
        terminal.wait()
        assert answer.result(), "the plan was not answered: the next generation does it"
    finally:
        file.write_text(before)


@pytest.mark.slow
def test_down_ends_a_debugger_at_its_prompt(launch: Callable[..., Server]) -> None:
    server = launch()
    terminal = Terminal(server, "debug", "controller", "-c", "b Serving._tick", "-c", "c")
    try:
        wait_for(server, "controller", "debugged")
        terminal.expect(PDB)
        server.client.close()
        done = server.mmrt("down", "--drain", "1")
        assert done.returncode == 0, done.stdout + done.stderr
        terminal.expect("controller: told to end")
        assert terminal.wait() == 0
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("decoed",), "no actor 'decoed'; did you mean decode? There are memory"),
        ((), "Missing argument 'ACTOR'"),
        (("decode", "--no-pdb", "-c", "c"), "--command is for pdb, which --no-pdb leaves out"),
    ],
)
def test_bad_arguments(own: Server, arguments: tuple[str, ...], complaint: str) -> None:
    done = own.mmrt("debug", *arguments)
    assert done.returncode != 0 and complaint in done.stderr


def test_without_a_run(own: Server, tmp_path: Path) -> None:
    environment = own.environment
    try:
        own.environment = {**environment, "MMRT_RUN_DIR": str(tmp_path)}
        done = own.mmrt("debug", "decode")
    finally:
        own.environment = environment
    assert done.returncode == 1 and "no supervisor answers" in done.stderr
