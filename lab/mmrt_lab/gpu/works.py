"""The part ``works``: tests that need a GPU, the kernels' own tests on it, each kernel beside its reference, and a model's answers."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .device import read_facts
from .device_tests import PASSED, SUITES
from .report import Report, format_report, write_report
from .results import Row, judge
from .runner import run_section
from .section import MODULES

_ANSWERS_S = 150.0  # kept for the last step, whatever the others take
_SUITE_S = 180.0
_CLEANING_S = 20.0
_WRITING_S = 5.0


def run(out: Path, missing: str, limit_s: float) -> int:
    """``missing``: the reason why whole runs are impossible, or "". Returns 1 where anything failed."""
    end_s = time.monotonic() + limit_s - _WRITING_S
    facts, path = read_facts(), out / "works.json"
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), flush=True)
    rows, seconds = list[Row](), dict[str, float]()
    report = Report(facts=facts, quick=False, ceilings={}, rows=[], seconds={})
    write_report(report, path)
    for step, found, took_s in _run_steps(missing, end_s):
        rows += found
        seconds[step] = took_s
        report = Report(facts=facts, quick=False, ceilings={}, rows=[judge(row, {}, "") for row in rows], seconds=seconds)
        write_report(report, path)
    print(f"\nwrote {path}\n\n{format_report(report)}")
    return 1 if report.count("FAILED") else 0


def condense(suite: str, rows: Sequence[Row]) -> list[Row]:
    """One row for all tests that passed or were skipped, and each of the others."""
    num_passed = sum(row.note == PASSED for row in rows)
    skipped = [row for row in rows if row.note.startswith("skipped")]
    others = [row for row in rows if row.note != PASSED and row not in skipped]
    note = f"{len(skipped)} skipped" if skipped else ""
    return [Row(section=suite, case=f"{num_passed} tests passed", note=note), *others]


def _run_steps(missing: str, end_s: float) -> Iterator[tuple[str, list[Row], float]]:
    """Name, rows and seconds of each step that ended."""
    before_answers_s = end_s - _ANSWERS_S
    with tempfile.TemporaryDirectory(prefix="mmrt-gpu-", ignore_cleanup_errors=True) as scratch:
        for number, step in enumerate([*SUITES, *MODULES]):
            begun_s = time.monotonic()
            print(f"{step}, {end_s - begun_s:.0f} s left", flush=True)
            is_suite = step in SUITES
            module = ["device_tests"] if is_suite else ["section", "--only", "checks"]
            command = [sys.executable, "-m", f"{__package__}.{module[0]}", *module[1:]]
            limit_s = min(before_answers_s, begun_s + _SUITE_S)
            rows = run_section(step, command, Path(scratch, f"{number}.jsonl"), os.environ, limit_s)
            yield step, condense(step, rows) if is_suite else rows, time.monotonic() - begun_s
        begun_s = time.monotonic()
        print(f"answers, {end_s - begun_s:.0f} s left", flush=True)
        yield "answers", answers(Path(scratch, "answers.json"), missing, end_s - begun_s), time.monotonic() - begun_s


def answers(file: Path, missing: str, limit_s: float, device: str = "cuda") -> list[Row]:
    """Greedy answers of a tiny model in whole runs, on the device and on the CPU. ``file`` does not exist yet."""
    if missing:
        return [Row(section="answers", case="equal", note=f"not run: {missing}")]
    command = [sys.executable, "-m", f"{__package__}.serve", "--device", device, "--shape", "tiny", "--sections", "answers"]
    process = subprocess.Popen([*command, "--limit", str(limit_s - _CLEANING_S), "--json", str(file)])
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print("whole runs did not end and were killed: see mmrt down", file=sys.stderr)
        process.kill()
        status = process.wait()
    figures: list[dict[str, Any]] = json.loads(file.read_text())["figures"] if file.exists() else []
    found = [
        Row(section="answers", case=figure["case"], rate=figure["value"], unit=figure["unit"], note=figure["note"], failed=bool(status))
        for figure in figures
    ]
    return found or [Row(section="answers", case="equal", note=f"ended with status {status}", failed=True)]
