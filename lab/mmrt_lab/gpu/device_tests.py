"""A process of tests on the device: pytest, which writes a row for each test as soon as it has ended. Started by ``works``.

A fault in a kernel takes the CUDA context with it: then this process ends with status ``LOST``, and is started again for the tests
after that one, like a section of kernels.
"""

import argparse
import importlib.util
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from .results import Row
from .section import LOST

ROOT = Path(__file__).parents[3]
_SETTINGS = "-p", "mmrt.tests.settings"
SUITES = {
    "tests that need a GPU": (*_SETTINGS, "-m", "gpu", "tests"),
    "kernels' tests on the GPU": (*_SETTINGS, "-m", "not slow and not gpu", "tests/triton_kernels"),
}
"""Arguments of pytest, by the names of the steps."""
PASSED = "passed"

_TEST_LIMIT_S = 120
_MOST_TEXT = 300  # characters of an error in a row


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tests of one suite. SIGALRM ends one that takes too long, and this process with it."""
    parser = argparse.ArgumentParser(prog="python -m mmrt_lab.gpu.device_tests", description="Tests on the GPU; the bench starts it.")
    parser.add_argument("suite", choices=list(SUITES))
    parser.add_argument("--rows", type=Path, required=True, metavar="FILE", help="lines of JSON are appended here")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first N tests")
    options = parser.parse_args(argv)
    why_not = _why_not()
    with options.rows.open("a") as sink:
        if why_not:
            _write(sink, Row(section=options.suite, case="tests", note=f"not run: {why_not}").to_json())
            return 0
        return run_tests(ROOT, SUITES[options.suite], Recorder(options.suite, sink, options.skip))


def run_tests(root: Path, selection: Sequence[str], recorder: "Recorder") -> int:
    """pytest in this process. Returns 0 where it could run what there is, whether it passed or not, else pytest's status."""
    import pytest

    plain = ["--rootdir", str(root), "--import-mode=importlib", "-o", "addopts=", "-o", "filterwarnings=default", "-q"]
    without = [argument for plugin in ("timeout", "xdist", "cacheprovider") for argument in ("-p", f"no:{plugin}")]
    chosen = [str(root / argument) if argument.startswith("tests") else argument for argument in selection]
    status = int(pytest.main([*plain, *without, *chosen], plugins=[recorder]))
    well = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    return 0 if status in well else status


class Recorder:
    """A plugin of pytest: writes what begins and what has ended, and stops when the device is lost."""

    def __init__(self, suite: str, sink: TextIO, num_skipped: int) -> None:
        self._suite = suite
        self._sink = sink
        self._number = num_skipped - 1
        self._num_skipped = num_skipped
        self._note = ""
        self._failed = False

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            _write(self._sink, self._row(report.nodeid, _last_words(report), failed=True))

    def pytest_collection_finish(self, session: Any) -> None:
        """Runs after every selection: the remaining tests are in the same order each time."""
        del session.items[: self._num_skipped]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._number += 1
        self._note, self._failed = PASSED, False
        _write(self._sink, json.dumps({"begun": self._number, "case": nodeid, "is_peer": False}))
        signal.alarm(_TEST_LIMIT_S)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self._failed:
            self._note, self._failed = _last_words(report), True
        elif report.skipped and not self._failed:
            self._note = f"skipped: {_last_words(report)}"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        signal.alarm(0)
        _write(self._sink, self._row(nodeid, self._note, failed=self._failed))
        if self._failed and not _device_answers():
            import pytest

            pytest.exit("the device is lost", returncode=LOST)

    def _row(self, nodeid: str, note: str, failed: bool) -> str:
        return Row(section=self._suite, case=nodeid, note=note, failed=failed).to_json()


def _why_not() -> str:
    if not (ROOT / "tests").is_dir():
        return "tests come with a checkout, not with an installed package"
    missing = [needed for needed in ("pytest", "hypothesis") if importlib.util.find_spec(needed) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def _last_words(report: Any) -> str:
    """The message of an exception, or the reason of a skip, on one line."""
    if isinstance(report.longrepr, tuple):
        said = str(report.longrepr[-1])
    else:
        crash = getattr(report.longrepr, "reprcrash", None)
        said = crash.message if crash is not None else str(report.longrepr)
    return " ".join(said.split())[:_MOST_TEXT]


def _device_answers() -> bool:
    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _write(sink: TextIO, line: str) -> None:
    sink.write(line + "\n")
    sink.flush()


if __name__ == "__main__":
    sys.exit(main())
