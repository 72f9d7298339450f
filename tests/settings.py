"""Settings of all suites, as a plugin: one thread computes, nothing is fetched, no deadlines for examples, short names of folders."""

import gc
import importlib
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from mmrt.shm.run_directory import RunDirectory

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost,::1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton looks when it is imported, by whichever test that is

gc.disable()  # until the tests are collected: objects come by the million, and few go


IS_NIGHT = os.environ.get("MMRT_TEST_EXAMPLES") == "all"


def examples(count: int) -> int:
    """How many of ``count`` examples or seeds a search tries: all in the nightly run, which says so, else a third."""
    return count if IS_NIGHT else -(-count // 3)


def seeds(count: int) -> range:
    """The seed that ``MMRT_TEST_SEED`` names; else seeds that no run had in the nightly run, and the same for each commit."""
    if chosen := os.environ.get("MMRT_TEST_SEED"):
        return range(int(chosen), int(chosen) + 1)
    first = time.time_ns() % 1_000_000_000 if IS_NIGHT else 1_000_000
    return range(first, first + examples(count))


def also_slow(*values: Any) -> list[Any]:
    """Values of a parameter that only the slow lane has; tuples are values of several parameters."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in values]


class ImportedLater:
    """A module that is imported when a test first uses it: each worker collects all files, and runs the tests of a few."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)  # pytest asks what lies in a file of tests for its marks
        return getattr(importlib.import_module(self._name), attribute)


# Machines are shared: a slow example is no failure. A commit is judged by the examples of the commit before; the night draws new ones.
settings.register_profile("mmrt", deadline=None, max_examples=examples(100), derandomize=not IS_NIGHT)
settings.load_profile("mmrt")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Sockets allow a run directory 74 bytes; pytest's own folder and those of its two processes within would take half of them."""
    if config.option.basetemp is None:
        config.option.basetemp = config.stash[_FOLDER] = tempfile.mkdtemp(prefix="mmrt-")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take every third of many parameters, and what takes longest first."""
    places: Counter[str] = Counter()
    taken, left_out = [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        is_taken = not item.get_closest_marker("many") or places[name] % 3 < examples(3)
        (taken if is_taken else left_out).append(item)
        places[name] += 1
    config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(taken, key=lambda item: next((at for at, part in enumerate(_FIRST) if part in item.nodeid), len(_FIRST)))


class ByRun(LoadFileScheduling):
    """One worker takes the tests of a file, and of files that share a run."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return next((run for run, files in _SHARED_RUNS.items() if Path(file).stem in files), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByRun:
    return ByRun(config, log)


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but never look again at what the modules have made."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(_FOLDER, None):
        shutil.rmtree(folder, ignore_errors=True)


# Whole runs wait, and other tests fill the cores meanwhile; kernels in an interpreter would be the last of one worker.
_FIRST = ("/end_to_end/", "/triton_kernels/")
_SHARED_RUNS = {  # a file that is missing here starts one more run, on another worker
    "own": {"test_cache_commands", "test_debug", "test_embedding_cache", "test_lifecycle", "test_prefix_cache", "test_restart"},
    "server": {"test_bad_input", "test_faults", "test_guidance", "test_logits", "test_media", "test_other_apis", "test_penalties"}
    | {"test_policy", "test_prefill_alone", "test_sound_tracks", "test_structured_output", "test_text", "test_tool_calls"}
    | {"test_devices", "test_terminal", "test_tools"},
    "breakable": {"test_outages", "test_scale", "test_unsupervised"},
    "processors": {"test_preprocess", "test_transparency", "test_frames"},  # of transformers, imported once by a process of its own
}
_FOLDER = pytest.StashKey[str]()


@pytest.fixture
def run() -> Iterator[RunDirectory]:
    """A run directory without a run: no process in it."""
    path = Path(tempfile.mkdtemp(prefix="mmrt-test-", dir="/dev/shm")) / "run"
    directory = RunDirectory.create(path, {})
    try:
        yield directory
    finally:
        directory.close()
        shutil.rmtree(path.parent)
