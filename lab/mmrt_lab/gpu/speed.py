"""The part ``speed``: every timing of every section, judged by what a copy and a matrix product reach on this device."""

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .device import Facts, read_facts
from .report import Report, format_report, write_report
from .results import Row, find_ceilings, judge
from .runner import run_section
from .section import MODULES

_SECTION_S = 130.0
_WRITING_S = 15.0


def run(out: Path, quick: bool, limit_s: float) -> int:
    """Returns 1 where a measurement failed or a target was missed."""
    end_s = time.monotonic() + limit_s - _WRITING_S
    report = _judge_all(read_facts(), quick, [], {})
    path = write_report(report, out / "speed.json")
    rows, seconds = list[Row](), dict[str, float]()
    for section, found, took_s in _run_sections(quick, end_s):
        rows += found
        seconds[section] = took_s
        report = _judge_all(report.facts, quick, rows, seconds)
        write_report(report, path)
    print(f"\nwrote {path}\n\n{format_report(report)}")
    return 1 if report.count("FAILED") or report.count("MISSED") else 0


def _judge_all(facts: Facts, quick: bool, rows: Sequence[Row], seconds: Mapping[str, float]) -> Report:
    ceilings = find_ceilings(rows, "ceilings")
    judged = [judge(row, ceilings, str(facts["device"])) for row in rows]
    return Report(facts=facts, quick=quick, ceilings=ceilings, rows=judged, seconds=seconds)


def _run_sections(quick: bool, end_s: float) -> Iterator[tuple[str, list[Row], float]]:
    """Name, rows and seconds of a section that ended. The last one has all the time that is left."""
    command = [sys.executable, "-m", f"{__package__}.section", "--only", "timings", *(["--quick"] if quick else [])]
    with tempfile.TemporaryDirectory(prefix="mmrt-gpu-", ignore_cleanup_errors=True) as scratch:
        for number, section in enumerate(MODULES):
            begun_s = time.monotonic()
            print(f"{section}, {end_s - begun_s:.0f} s left", flush=True)
            limit_s = end_s if section == list(MODULES)[-1] else min(end_s, begun_s + _SECTION_S)
            rows = run_section(section, command, Path(scratch, f"{number}.jsonl"), os.environ, limit_s)
            yield section, rows, time.monotonic() - begun_s
