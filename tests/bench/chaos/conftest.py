"""Storms through the command line, as a user types it: the storm leaves its mount namespace, which the test must not."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrt.tests.end_to_end.conftest import checkpoints, oracle

__all__ = ["checkpoints", "oracle"]

Storm = Callable[..., dict[str, Any]]


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
