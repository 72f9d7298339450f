"""Storms through the command line, as a user types it: the storm leaves its mount namespace, which the test must not."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrt.runtime.stage_table import actors_of
from mmrt.shm.controller_stats import ControllerStats
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.sequence_table import SequenceTable
from mmrt.shm.status import ActorTable
from mmrt.shm.step_gaps import StepGaps

Storm = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    """The run directory of an idle run of 2E+P+2D."""
    directory = RunDirectory.create(tmp_path / "run", {})
    ActorTable.create(directory, actors_of("2E+P+2D")).close()
    ControllerStats.create(directory).close()
    StepGaps.create(directory, 2).close()
    SequenceTable.create(directory, 2, 64, 16).close()
    yield directory
    directory.destroy()


@pytest.fixture
def storm(checkpoints: Callable[[str], Path], tmp_path: Path) -> Storm:
    """``storm("--seed", "1", …)``: its report. A storm that breaks a promise fails the test, with all that it has printed."""

    def run(*arguments: str, timeout_s: float) -> dict[str, Any]:
        report = tmp_path / "report.json"
        command = [sys.executable, "-m", "mmrt.cli.main", "chaos", "--model", str(checkpoints("qwen2_5_omni"))]
        done = subprocess.run(
            [*command, "--json", str(report), "--out", str(tmp_path / "logs"), *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
        print(done.stdout, done.stderr)
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(report.read_text())
        return found

    return run
