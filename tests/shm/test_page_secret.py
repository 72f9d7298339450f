"""The run's secret: made once, whoever comes first, and readable by its user alone."""

import os
from pathlib import Path

import pytest

from mmrt.shm.page_secret import SECRET_BYTES, page_secret


def test_the_first_call_makes_it(tmp_path: Path) -> None:
    secret = page_secret(tmp_path)
    assert len(secret) == SECRET_BYTES and page_secret(tmp_path) == page_secret(tmp_path, b"o" * SECRET_BYTES) == secret
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_given_one_is_kept(tmp_path: Path) -> None:
    assert page_secret(tmp_path, b"o" * SECRET_BYTES) == page_secret(tmp_path) == b"o" * SECRET_BYTES


@pytest.mark.parametrize("call", ["open", "link"])
def test_of_two_processes_that_make_it_both_get_the_same(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one does all of it before a step of this one: the two controllers would not find each other's pages."""
    found: list[bytes] = []
    real = getattr(os, call)

    def second(*arguments: object, **more: object) -> object:
        monkeypatch.setattr(os, call, real)
        found.append(page_secret(tmp_path))
        return real(*arguments, **more)

    monkeypatch.setattr(os, call, second)
    mine = page_secret(tmp_path)
    assert page_secret(tmp_path) == mine and (not found or found == [mine])
    assert len(list(tmp_path.iterdir())) == 1, "parts are left"


def test_a_link_that_others_laid_in_the_way_is_not_followed(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    (run / f".page-secret.{os.getpid()}").symlink_to(elsewhere)
    page_secret(run)
    assert not elsewhere.exists()
