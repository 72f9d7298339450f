"""The command: ``python -m mmrt.bench.gpu``. Touches the device only to read facts; sections do the work, in processes of their own."""

import argparse
import importlib
import importlib.util
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
_WHOLE_RUNS_S = 250.0  # of these, where whole runs can be measured
_CLEANING_S = 20.0
_SECTION_S = 130.0

_DESCRIPTION = """\
Checks every kernel against its reference on this machine's GPU, then times it: as a rate and as a share of what a copy or a matrix
product reaches here; then measures whole runs. Takes at most 8 minutes, less with --quick. Settings of the card are not changed.
gpu.json and serve.json are written anew after every section: a bench that is ended early leaves what it had. All tables come last.
Ends with 1 where there is no CUDA device, a check or a measurement failed, or a target was missed.
"""
_EPILOG = """\
Without installing: the package mmrt is the root of the source tree. In a checkout, .links/mmrt is a link to it:

    PYTHONPATH=.links python3 -m mmrt.bench.gpu

Where links were not copied, make one: mkdir .links && ln -s .. .links/mmrt

One section by itself, say the sweep, for which the time of all is often too short; its rows are lines of JSON:

    PYTHONPATH=.links python3 -m mmrt.bench.gpu.section sweep --rows sweep.jsonl

Whole runs by themselves, which need all that mmrt needs: python -m mmrt.bench.gpu.serve

Where wheels of what is missing lie beside the tree, say in wheels/, unpack them where nothing else is, and put that on the path, too:

    python3 -m pip install --no-index --no-deps --target packages wheels/*.whl
    PYTHONPATH=.links:packages python3 -m mmrt.bench.gpu

Needs torch 2.11 or later with CUDA, triton 3.6 or later, numpy, and a C compiler for Triton's launchers. matplotlib, FlashInfer,
flash-attn and FlashAttention 3 (flash_attn_interface) are used where they are installed. The section "video" needs PyNvVideoCodec and
the packages that mmrt decodes with; nvImageCodec for JPEGs. Whole runs are of the 7B shape where there are 40 GiB on the device and
20 GB for what passes (TMPDIR), else of the 3B shape, for which there are no targets.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all sections, print the tables, write the files. Returns the exit status that --help tells."""
    parser = argparse.ArgumentParser(
        prog="python -m mmrt.bench.gpu", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes; no sweep, no FlexAttention, no 3B shape")
    about = "for gpu.json, serve.json and their pictures (%(default)s)"
    parser.add_argument("--out", type=Path, default=Path("gpu-bench"), metavar="DIR", help=about)
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
    written.append(_picture(report, options.out))
    all_well = not (report.count("FAILED") or report.count("MISSED"))
    whole = f"whole runs are not measured: {missing}\n"
    if not missing:
        json, table = options.out / "serve.json", options.out / "serve.txt"
        all_well &= _run_whole(json, table, options.quick, end_s)
        written += [json, table]
        whole = table.read_text()
    print(f"\nwrote {', '.join(map(str, written))}\n\n{format_report(report)}\n\n{whole}", end="")
    return 0 if all_well else 1


def _picture(report: Report, directory: Path) -> Path | str:
    """Where it is, or why there is none."""
    try:
        return write_picture(report, directory)
    except ImportError:
        return "no picture: matplotlib is not installed"
    except Exception as error:
        return f"no picture: {type(error).__name__}: {error}"


def _what_serving_lacks() -> str:
    try:
        importlib.import_module(".serve", __package__)
        for needed_on_cuda in ("cuda.bindings", "transformers"):
            if importlib.util.find_spec(needed_on_cuda) is None:
                return f"No module named {needed_on_cuda!r}"
    except ImportError as error:
        return str(error)
    return ""


def _run_whole(json: Path, table: Path, quick: bool, end_s: float) -> bool:
    """``serve`` in what is left of the time; its table goes to a file. It cleans up when it is interrupted."""
    limit_s = max(0.0, end_s - _CLEANING_S - time.monotonic())
    command = [sys.executable, "-m", f"{__package__}.serve", "--json", str(json), "--plot", str(json.with_suffix(".png"))]
    print(f"whole runs, {limit_s:.0f} s left", flush=True)
    with table.open("wb") as output:
        process = subprocess.Popen([*command, *(["--quick"] if quick else [])], stdout=output)
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
