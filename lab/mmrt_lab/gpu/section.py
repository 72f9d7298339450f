"""The process of one section: its checks and timings, each guarded, each a line of JSON in a file as soon as it is there.

Started by ``runner`` as ``python -m mmrt_lab.gpu.section NAME --rows FILE``. A fault in a kernel takes the CUDA context with it: then
this process ends with status ``LOST``, and is started again for the cases after that one.
"""

import argparse
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .case import Check, Timing
from .results import Row
from .timing import Clock

MODULES = {
    "ceilings": "ceilings",
    "steps": "steps",
    "paged_decode": "paged_decode",
    "paged_extend": "paged_extend",
    "vision_attention": "vision_attention",
    "sampling": "sampling",
    "kv_write": "kv_write",
    "rms_norm, silu_mul": "row_kernels",
    "embedding_pages": "embedding_pages",
    "sharing": "sharing",
    "video": "video_units",
    "peers": "peers",
}
"""Sections in the order in which they run, by the modules that have their ``timings``, and ``checks`` if there are any."""

CASE_LIMIT_S = 75
LOST = 3  # exit status

_MOST_TEXT = 300  # characters of an error in a row

Synchronize = Callable[[], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases of one section on the first visible CUDA device. SIGALRM, which nothing catches, ends an overlong case."""
    parser = argparse.ArgumentParser(
        prog="python -m mmrt_lab.gpu.section", description="One section of the bench; the bench starts it."
    )
    parser.add_argument("section", choices=list(MODULES))
    parser.add_argument("--rows", type=Path, required=True, metavar="FILE", help="lines of JSON are appended here")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first N cases")
    parser.add_argument("--only", choices=("checks", "timings"), help="(both)")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(argv)
    device = torch.device("cuda", 0)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False  # as in actors: float32 is float32
    with options.rows.open("a") as sink:

        def write(line: str) -> None:
            sink.write(line + "\n")
            sink.flush()

        signal.alarm(CASE_LIMIT_S)
        clock: Clock | None = None
        for number, case in enumerate(cases(options.section, device, options.quick, options.only)):
            if number < options.skip:
                continue
            name, is_peer = (case.case if isinstance(case, Row) else case.name), isinstance(case, Timing) and case.is_peer
            write(json.dumps({"begun": number, "case": name, "is_peer": is_peer}))
            signal.alarm(CASE_LIMIT_S)
            if clock is None and isinstance(case, Timing):
                clock = Clock(device)
            for row in execute(case, clock, torch.cuda.synchronize):
                row = replace(row, section=options.section)
                write(row.to_json())
                print(progress(row), flush=True)
            if not _free_memory():
                return LOST
    return 0


def cases(section: str, device: torch.device, quick: bool, only: str | None = None) -> Iterator[Check | Timing | Row]:
    """Checks, then timings. An error in making them becomes the last row."""
    try:
        torch.manual_seed(0)
        module: Any = importlib.import_module(f".{MODULES[section]}", __package__)
        if only != "timings" and hasattr(module, "checks"):
            yield from module.checks(device, "device")
        if only != "checks":
            yield from module.timings(quick)
    except Exception as error:
        yield _failure("the list of cases", error)


def execute(case: Check | Timing | Row, clock: Clock | None, synchronize: Synchronize) -> list[Row]:
    """The rows of a case; any exception becomes one."""
    if isinstance(case, Row):
        return [case]
    try:
        if isinstance(case, Check):
            return [_check(case, synchronize)]
        assert clock is not None
        return [replace(row, case=row.case or case.name) for row in case.run(clock)]
    except Exception as error:
        row = _failure(case.name, error)
        if isinstance(case, Check):
            return [replace(row, case=f"check {case.name}")]
        return [replace(row, failed=row.failed and not case.is_peer)]


def progress(row: Row) -> str:
    """A line while the bench runs."""
    value = "" if row.time_us is None else f"  {row.time_us:,.1f} us"
    value += "" if row.rate is None else f"  {row.rate:,.4g} {row.unit}"
    value += "  FAILED" if row.failed else "  ok" if row.difference is not None else ""
    return f"  {row.section}: {row.case}{value}{'  ' + row.note if row.note else ''}"


def _check(check: Check, synchronize: Synchronize) -> Row:
    """Run a check twice: the extra time of the first run is the cost of first launches, mostly compilation."""
    times_s = [time.perf_counter()]
    difference = 0.0
    for _ in range(2):
        difference = max(difference, check.run())
        synchronize()
        times_s.append(time.perf_counter())
    first_s = max(0.0, (times_s[1] - times_s[0]) - (times_s[2] - times_s[1]))
    return Row(case=f"check {check.name}", difference=difference, first_s=first_s)


def _free_memory() -> bool:
    """True if the device still answers, and no capture failed: torch leaves its stream the current one, and its pool in use."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.current_stream() == torch.cuda.default_stream()
    except RuntimeError:
        return False


def _failure(case: str, error: Exception) -> Row:
    """The row of a failure; a missing third-party library is not one."""
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("mmrt"):
        return Row(case=case, note=f"not run: {error}")
    text = " ".join(str(error).split())
    return Row(case=case, failed=True, note=f"{type(error).__name__}: {text[:_MOST_TEXT]}")


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a broken context would abort the interpreter's end, and hide the status
