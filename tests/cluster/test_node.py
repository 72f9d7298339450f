"""A node that cannot start, and one whose owner has ended before it was asked to end with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmrt.cluster.node import Node
from mmrt.runtime.errors import RunError

PROGRAM = [sys.executable, "-P", "-m", "mmrt.cluster.node"]


def test_a_node_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(RunError, match=r"the run has ended:\n.*/nowhere/python"):
        Node("")


@pytest.mark.slow
def test_the_next_node_removes_what_one_that_was_killed_whole_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MMRT_RUN_DIR", raising=False)
    node = Node("[server]\nport = 0\n")
    assert node._process is not None
    run, killed = node._run, [node._process.pid]
    for parent in killed:
        killed += [int(child) for task in Path(f"/proc/{parent}/task").iterdir() for child in (task / "children").read_text().split()]
    for process in killed:
        os.kill(process, signal.SIGKILL)
    node.close()
    assert run.exists()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    deadline_s = time.monotonic() + 60
    while run.exists():  # until the last of them is gone
        assert time.monotonic() < deadline_s
        with pytest.raises(RunError):
            Node("")


def test_an_owner_that_has_ended_is_noticed_under_any_reaper(tmp_path: Path) -> None:
    """The program's parent is another than its owner, and not process 1."""
    ended = subprocess.Popen(["/bin/true"])
    ended.wait()
    command = [*PROGRAM, str(ended.pid), "/bin/touch", str(tmp_path / "ran")]
    found = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert (found.returncode, found.stderr) == (1, "the parent has ended\n") and not (tmp_path / "ran").exists()


def test_a_program_whose_owner_lives(tmp_path: Path) -> None:
    subprocess.run([*PROGRAM, str(os.getpid()), "/bin/touch", str(tmp_path / "ran")], check=True)
    assert (tmp_path / "ran").exists()
