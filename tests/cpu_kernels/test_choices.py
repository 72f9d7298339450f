"""What was tried once is kept, until something changes on which it depends."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from mmrt.cpu_kernels import choices, kernel, kernel_files
from mmrt.cpu_kernels.choices import fastest, kept


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(kernel_files, "_directory", tmp_path / "kernels")
    for cached in (kernel.sources_digest, choices._key):
        cached.cache_clear()
    yield tmp_path / "kernels"
    choices._key.cache_clear()


def work(seconds: float) -> None:
    until_s = time.process_time() + seconds
    while time.process_time() < until_s:
        pass


def test_the_fastest_is_found_once_and_said(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        assert fastest("rows", {"slow": lambda: work(0.01), "quick": lambda: work(0.001)}) == "quick"
    (record,) = caplog.records
    assert record.getMessage().startswith("tried rows in ") and "quick (quick " in record.getMessage()
    assert list(kernel_files.choices()) == ["rows"] and kernel_files.choices()["rows"].startswith("quick (quick 1.")


@pytest.mark.parametrize("change", ["variable", "torch", "file", "sources"])
def test_it_is_tried_again_when_something_changes(change: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept("rows", lambda: "one") == kept("rows", lambda: "other") == "one"
    choices._key.cache_clear()
    assert kept("rows", lambda: "other") == "one"
    if change == "variable":
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    elif change == "torch":
        monkeypatch.setattr(choices.torch, "__version__", "0")
    elif change == "sources":
        monkeypatch.setattr(choices, "sources_digest", lambda: bytes(32))
    else:
        (directory / "rows.choice").write_bytes(b"damaged")
    choices._key.cache_clear()
    assert kept("rows", lambda: "other") == kept("rows", lambda: "one") == "other"


def test_it_is_tried_again_when_the_trial_changes(directory: Path, tmp_path: Path) -> None:
    """Another version may try more, in a module that is none of the kernels'."""
    module, found = tmp_path / "trial.py", []
    for result in ("one", "one", "other"):
        source = f"def find(): return {result!r}\ndef of_{result}(): pass\n"
        module.write_text(source)
        exec(compile(source, module, "exec"), names := dict[str, Any]())
        choices._key.cache_clear()
        found.append(kept("rows", names["find"]))
        assert fastest("columns", {f"of-{result}": names[f"of_{result}"]}) == f"of-{result}"
    assert found == ["one", "one", "other"]
    module.unlink()
    choices._key.cache_clear()
    assert kept("rows", names["find"]) == "other", "tried, and not kept"


def test_who_looked_too_early_takes_what_another_one_found(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one wrote it, and gave its lock back, between the first look and the lock."""
    alone = kernel_files.alone

    def late(name: str) -> AbstractContextManager[None]:
        monkeypatch.setattr(kernel_files, "alone", alone)
        assert kept("rows", lambda: "other") == "other"
        return alone(name)

    monkeypatch.setattr(kernel_files, "alone", late)
    assert kept("rows", lambda: "one") == "other"


def test_one_of_several_tries(directory: Path) -> None:
    """Each thread stands for a process: all begin at once, and find what the first one found."""
    tried, found = list[int](), list[str]()

    def find() -> str:
        tried.append(1)
        time.sleep(0.2)
        return "one"

    threads = [threading.Thread(target=lambda: found.append(kept("rows", find))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["one"] * 3 and len(tried) == 1


def test_without_a_place_it_is_tried_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_files, "_directory", None)
    assert (kept("rows", lambda: "one"), kept("rows", lambda: "other")) == ("one", "other")
    assert kernel_files.choices() == {}
