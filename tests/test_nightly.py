"""``.ci/nightly`` and the units that start it, on lanes that stand in for hours of tests."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CI = Path(__file__).parents[1] / ".ci"


def nightly(home: Path, *lanes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([home / "mmrt/.ci/nightly", *lanes], capture_output=True, text=True, timeout=60)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a clone: no environment of ray can be made, a client fails, and the slow tests pass."""

    def write(name: str, text: str) -> None:
        file = tmp_path / "mmrt" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)

    answers = {"pytest": r"==== 7 passed, 1 skipped in 9s ====\n\n", "ahead_of_time": r"21 variants within their budgets\n"}
    write(".venv/bin/python", "case $* in" + "".join(f' *{name}*) printf "{text}";;' for name, text in answers.items()) + " esac")
    write(".venv-ray/bin/python", "echo no ray for this Python >&2; exit 1")
    write(".ci/newcomer", '[ "$1" = --others ] && echo "newcomer: 0 of 3 lanes failed"')
    write(".ci/audit", "echo 0 of 0 packages have known faults; exit 3")
    write(".ci/clients", "echo 1 failed, 2 passed in 3.5s; echo an error behind it; exit 1")
    shutil.copy(CI / "nightly", tmp_path / "mmrt/.ci/nightly")
    return tmp_path


def test_a_table_of_lanes(home: Path) -> None:
    done = nightly(home)
    assert done.returncode == 1 and done.stderr == ""
    title, *rows = done.stdout.splitlines()
    assert title.startswith("nightly, ")
    assert [re.split(r"\s{2,}", re.sub(r"\d+ min", "", row)) for row in rows] == [
        ["slow", "passed", "7 passed, 1 skipped in 9s"],
        ["all", "passed", "7 passed, 1 skipped in 9s"],
        ["lab", "passed", "7 passed, 1 skipped in 9s"],
        ["kernels", "passed", "21 variants within their budgets"],
        ["clients", "failed", "1 failed, 2 passed in 3.5s"],
        ["ray", "not run", "no environment: no ray for this Python"],
        ["newcomer", "passed", "newcomer: 0 of 3 lanes failed"],
        ["audit", "not run", "no environment: 0 of 0 packages have known faults"],
    ]
    assert (home / "mmrt/.nightly/clients.log").read_text() == "1 failed, 2 passed in 3.5s\nan error behind it\n"
    assert nightly(home, "slow", "ray").returncode == 0
    wrong = nightly(home, "slow", "gpu")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "nightly: there is no lane gpu, only slow, all, lab, kernels, clients, ray, newcomer and audit\n"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_accepts_the_units(home: Path) -> None:
    units = [CI / f"mmrt-nightly.{kind}" for kind in ("service", "timer")]
    command = ["systemd-analyze", "--user", "verify", "--recursive-errors=no", "--man=no", *map(str, units)]
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "XDG_RUNTIME_DIR": str(home)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
