"""The number of the code: it changes with every edit of what computes, and with nothing else."""

import os
from pathlib import Path

import pytest

from mmrt.actors.host import loaded_code as module
from mmrt.actors.host.loaded_code import loaded_code


def test_the_number_changes_with_edits_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PACKAGE", tmp_path)
    for part in ("media", "models", "runtime"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "code.py").write_text("pass\n")
    first = loaded_code()
    (tmp_path / "runtime" / "code.py").write_text("other\n")
    (tmp_path / "models" / "config.json").write_text("{}")
    (tmp_path / "media" / ".#code.py").symlink_to("somebody@somewhere.1:2")  # what Emacs leaves while it edits
    assert loaded_code() == first
    os.utime(tmp_path / "models" / "code.py", ns=(1, 1))
    second = loaded_code()
    (tmp_path / "media" / "code.py").write_text("an edit\n")
    third = loaded_code()
    (tmp_path / "media" / "more.py").write_text("")
    assert len({first, second, third, loaded_code()}) == 4
