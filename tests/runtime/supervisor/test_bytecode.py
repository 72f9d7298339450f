"""A start that makes bytecode says so, and why it is not kept."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmrt.runtime.supervisor.bytecode import missing_bytecode


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "imported_at_starts"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_bytecode_that_this_start_makes(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert missing_bytecode(package.name) == (
        "has no bytecode of imported_at_starts: this start makes it and takes longer, later ones find it"
    )
    subprocess.run([sys.executable, "-m", "compileall", "-q", package], check=True)
    assert missing_bytecode(package.name) == ""


def test_bytecode_that_is_not_kept(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert f"PYTHONDONTWRITEBYTECODE is set: each start makes it; unset it, or call python -m compileall -q {package}" in (
        missing_bytecode(package.name)
    )


def test_bytecode_that_may_not_be_kept(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Say of packages that root has installed. Root may write everywhere, so the system's answer is given."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(os, "access", lambda path, mode: (Path(path), mode) != (package, os.W_OK))
    assert missing_bytecode(package.name) == (
        f"has no bytecode of imported_at_starts, and may not write in {package}: each start makes it; "
        f"call python -m compileall -q {package} as its owner"
    )


def test_no_package() -> None:
    assert missing_bytecode("nobody_has_this") == missing_bytecode("sys") == ""
