"""The command: ``python -m mmrt.bench.gpu``. Touches the device only to read facts; sections do the work, in processes of their own."""

import argparse
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from .device import Facts, read_facts
from .report import Report, format_report, write_picture, write_report
from .results import Row, find_ceilings, judge
from .runner import run_section
from .section import MODULES

_BUDGET_S = 465.0  # 8 minutes, less starting and writing
_WHOLE_RUNS_S = 210.0  # of these, where whole runs can be measured
_CLEANING_S = 20.0
_SECTION_S = 130.0

_DESCRIPTION = """\
Checks every kernel against its reference on this machine's GPU, then times it: as a rate and as a share of what a copy or a matrix
product reaches here; then measures whole runs. Takes at most 8 minutes, less with --quick. Settings of the card are not changed.
gpu.json and serve.json are written anew after every section: a bench that is ended early leaves what it had. Ends with 1 where there
is no CUDA device, a check or a measurement failed, or a target was missed.
"""
_EPILOG = """\
Without installing: the package mmrt is the root of the source tree. In a checkout, .links/mmrt is a link to it:

    PYTHONPATH=.links python3 -m mmrt.bench.gpu

Where links were not copied, make one: mkdir .links && ln -s .. .links/mmrt

One section by itself, say the sweep, for which the time of all is often too short; its rows are lines of JSON:

    PYTHONPATH=.links python3 -m mmrt.bench.gpu.section sweep --rows sweep.jsonl

Whole runs by themselves, which need all that mmrt needs: python -m mmrt.bench.gpu.serve

Needs torch 2.11 or later with CUDA, triton 3.6 or later, numpy, and a C compiler for Triton's launchers. matplotlib, FlashInfer and
flash-attn are used where they are installed. The section "video" needs PyNvVideoCodec and the packages that mmrt decodes with.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all sections, print the tables, write the files. Returns the exit status that --help tells."""
    parser = argparse.ArgumentParser(
        prog="python -m mmrt.bench.gpu", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes; no sweep, no FlexAttention, no 3B shape")
    parser.add_argument("--out", type=Path, default=Path("gpu-bench"), metavar="DIR", help="for gpu.json and gpu.png (%(default)s)")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: this bench needs a CUDA device, and torch sees none", file=sys.stderr)
        return 1
    end_s, missing = time.monotonic() + _BUDGET_S, _what_serving_lacks()
    report = _judge_all(read_facts(), options.quick, [], {})
    written: list[Path | str] = [write_report(report, options.out)]
    rows, seconds = list[Row](), dict[str, float]()
    for section, found, took_s in _run_sections(options.quick, end_s if missing else end_s - _WHOLE_RUNS_S):
        rows += found
        seconds[section] = took_s
        report = _judge_all(report.facts, options.quick, rows, seconds)
        write_report(report, options.out)
    try:
        written += write_picture(report, options.out)
    except Exception as error:
        written.append(f"no picture: {type(error).__name__}: {error}")
    print(f"\nwrote {', '.join(map(str, written))}\n\n{format_report(report)}")
    all_well = not (report.count("FAILED") or report.count("MISSED"))
    if missing:
        print(f"\nwhole runs are not measured: {missing}")
    else:
        all_well &= _run_whole(options.out / "serve.json", options.quick, end_s)
    return 0 if all_well else 1


def _what_serving_lacks() -> str:
    try:
        importlib.import_module(".serve", __package__)
    except ImportError as error:
        return str(error)
    return ""


def _run_whole(json: Path, quick: bool, end_s: float) -> bool:
    """``serve`` in what is left of the time. It cleans up when it is interrupted."""
    limit_s = max(0.0, end_s - _CLEANING_S - time.monotonic())
    process = subprocess.Popen([sys.executable, "-m", f"{__package__}.serve", "--json", str(json), *(["--quick"] if quick else [])])
    try:
        return process.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        return _ends_within(process, _CLEANING_S)


def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether it ends well; killed otherwise, and what it has started may go on."""
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        print("whole runs did not end and were killed: see mmrt down", file=sys.stderr)
        process.kill()
        process.wait()
        return False


def _judge_all(facts: Facts, quick: bool, rows: Sequence[Row], seconds: Mapping[str, float]) -> Report:
    ceilings = find_ceilings(rows, "ceilings")
    judged = [judge(row, ceilings, str(facts["device"])) for row in rows]
    return Report(facts=facts, quick=quick, ceilings=ceilings, rows=judged, seconds=seconds)


def _run_sections(quick: bool, end_s: float) -> Iterator[tuple[str, list[Row], float]]:
    """Name, rows and seconds of a section that ended. Kernels are compiled anew: what a first launch costs is one of the figures."""
    command = [sys.executable, "-m", f"{__package__}.section", *(["--quick"] if quick else [])]
    with tempfile.TemporaryDirectory(prefix="mmrt-gpu-", ignore_cleanup_errors=True) as scratch:
        caches = {"TMPDIR": scratch, "TRITON_CACHE_DIR": f"{scratch}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor"}
        for number, section in enumerate(MODULES):
            if quick and section == "sweep":
                continue
            begun_s = time.monotonic()
            print(f"{section}, {end_s - begun_s:.0f} s left", flush=True)
            limit_s = end_s if section == list(MODULES)[-1] else min(end_s, begun_s + _SECTION_S)
            rows = run_section(section, command, Path(scratch, f"{number}.jsonl"), {**os.environ, **caches}, limit_s)
            yield section, rows, time.monotonic() - begun_s


if __name__ == "__main__":
    sys.exit(main())
