"""A node that cannot start, and one whose owner has ended before it was asked to end with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmrt.cluster.node import Node
from mmrt.runtime.errors import RunError

PROGRAM = [sys.executable, "-P", "-m", "mmrt.cluster.node"]


def test_a_node_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(RunError, match=r"the run has ended:\n.*/nowhere/python"):
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
