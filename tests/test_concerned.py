"""Which lanes of ``.ci/run`` a change concerns, in a small tree with the folders of this one."""

import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = {
    "shm/ring.py": "",
    "shm/pool.py": "from . import ring",
    "cli/up.py": "",
    "tests/toy.py": "from mmrt.cli import up",
    "triton_kernels/add/kernel.py": "import triton",
    "lab/mmrt_lab/sim.py": "from mmrt.shm.pool import PagePool",
    "lab/tests/test_sim.py": "from mmrt_lab.sim import run",
    "lab/docs/simulator.md": "It simulates.",
    "demo_model/mmrt_demo_model/exam.py": "from mmrt_lab import sim",
    "demo_model/tests/test_exam.py": "def test_it():\n    from mmrt.tests import toy",
    "models/demo/weights": "",
    "docs/index.md": "",
    "pyproject.toml": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/concerned.py").write_text((Path(__file__).parents[1] / ".ci/concerned.py").read_text())
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    for arguments in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "First"]):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
    return tmp_path


def concerned(tree: Path, *revision: str) -> list[str]:
    command = [sys.executable, tree / ".ci/concerned.py", *revision]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_a_change_concerns_those_that_import_it(tree: Path) -> None:
    assert concerned(tree, "HEAD") == []
    for name, lanes in {
        "shm/ring.py": ["lab", "demo_model"],
        "cli/up.py": ["demo_model"],
        "lab/docs/simulator.md": ["lab"],
        "demo_model/tests/test_exam.py": ["demo_model"],
        "models/demo/weights": ["demo_model"],
        "triton_kernels/add/kernel.py": ["kernels"],
        "docs/index.md": [],
        "pyproject.toml": ["lab", "demo_model", "kernels"],
    }.items():
        (tree / name).write_text(f"{SOURCES[name]}\n")
        assert concerned(tree, "HEAD") == lanes, name
        (tree / name).write_text(SOURCES[name])
    (tree / "shm/pool.py").unlink()
    assert concerned(tree, "HEAD") == ["lab", "demo_model"]


def test_without_a_known_commit_all_are_concerned(tree: Path) -> None:
    assert concerned(tree) == concerned(tree, "HEAD^") == concerned(tree, "0123456") == ["lab", "demo_model", "kernels"]
