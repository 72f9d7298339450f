"""Runs that a bench starts itself: from where their processes import, and that they end with the bench."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mmrt.cli.daemon import make_imports_absolute
from mmrt.models.make.checkpoint import make_checkpoint

ROOT = Path(__file__).parents[2]
NOTE = """
import os, sys
from pathlib import Path
Path(os.environ["NOTES"], str(os.getpid())).write_text(" ".join(sys.orig_argv))
"""
SCRIPT = """
import os, signal, sys
from pathlib import Path
import mmrt
from mmrt.bench.own_run import own_run
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import ModelSection, ServerSection

assert Path(mmrt.__file__).parent == Path(".links/mmrt").absolute()
with own_run() as run:
    run.up(RuntimeConfig(model=ModelSection(path=sys.argv[1]), server=ServerSection(port=0)))
    print(run.run, run.home)
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
"""


@pytest.mark.parametrize(
    ("path", "absolute"),
    [(".links:/opt/wheels:..", f"{Path.cwd()}/.links:/opt/wheels:{Path.cwd().parent}"), ("", ""), (None, None)],
)
def test_imports_are_absolute(path: str | None, absolute: str | None) -> None:
    environ = {"HOME": "x"} if path is None else {"HOME": "x", "PYTHONPATH": path}
    make_imports_absolute(environ)
    assert environ.get("PYTHONPATH") == absolute and environ["HOME"] == "x"


def test_a_run_of_a_bare_tree_imports_from_it_and_ends_with_its_bench(tmp_path: Path) -> None:
    """As the GPU bench's --help tells, with a relative PYTHONPATH, although a daemon works in the root directory."""
    links, notes = tmp_path / ".links", tmp_path / "notes"
    links.mkdir()
    notes.mkdir()
    (links / "mmrt").symlink_to(ROOT)
    (links / "sitecustomize.py").write_text(NOTE)
    make_checkpoint("tiny", tmp_path / "null", "null")
    environment = {**os.environ, "PYTHONPATH": ".links", "NOTES": str(notes)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "null")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")
    assert not any(Path(left).exists() for left in done.stdout.split())
    commands = [note.read_text() for note in notes.iterdir()]
    assert any("mmrt.runtime.supervisor.zygote" in command for command in commands)
    assert any(" actor " in command for command in commands)
