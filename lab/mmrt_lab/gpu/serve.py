"""``python -m mmrt_lab.gpu.serve``: whole runs on this machine's GPU, through HTTP: the same answers, how fast, and how soon again.

Needs all that mmrt needs, where the kernels' bench needs torch and Triton alone. It is the part ``serve`` of that bench, and the last
step of its part ``works``.
"""

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from mmrt.bench.environment import Environment, read_environment
from mmrt.bench.output import JSON_HELP, STANDARD_OUTPUT, open_console, write_json
from mmrt.bench.own_run import OwnRun, OwnRunError, own_run
from mmrt.bench.render import show_environment
from mmrt.bench.serve.errors import BenchError

from .figures import Figure
from .report import format_table
from .whole_runs import SECTIONS

_DEVICE_BYTES, _DISK_BYTES = 40 * 2**30, 20 * 10**9  # for 17 GB of weights: KV, activations and three contexts beside them; the file
_CLEANING_S = 20.0  # of a limit
COLUMNS = ("", "", "target", "", "")


class ServeBench(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    device: str
    shape: str
    figures: list[Figure]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 where a section failed, a target was missed, or there is no such device."""
    options = _parse(argv)
    if options.device != "cpu" and not torch.cuda.is_available():
        skipped = ", ".join(options.sections)
        print(f"error: {skipped} cannot run on {options.device}: torch {torch.__version__} sees no CUDA device", file=sys.stderr)
        return 1
    if options.limit is not None:
        signal.setitimer(signal.ITIMER_REAL, max(1.0, options.limit - _CLEANING_S))
    console = open_console(options.json)
    figures: list[Figure] = []
    if options.model is not None:
        options.shape = options.model.name
    if options.shape is None:
        options.shape, why = choose_shape(options.device)
        if why:
            figures.append(Figure(section="shape", case=f"{options.shape}, not 7b", note=why, in_time=False))
    bench = ServeBench(environment=read_environment(), device=_device_name(options.device), shape=options.shape, figures=figures)
    waiting = list(options.sections)
    try:
        with own_run() as run:
            while waiting:
                print(waiting[0], file=sys.stderr, flush=True)
                for figure in _section(waiting[0], run, options):
                    figures.append(figure)
                    if options.json != STANDARD_OUTPUT:
                        write_json(options.json, bench)
                del waiting[0]
    except KeyboardInterrupt:
        figures += [Figure(section=section, case=section, note="ended early", in_time=False) for section in waiting]
    except OwnRunError as error:
        figures.append(Figure(section="down", case="down", note=str(error)))
    write_json(options.json, bench)
    show_environment(console, bench.environment)
    print(format_table(f"{bench.shape} on {bench.device}", COLUMNS, [figure.cells() for figure in figures]), file=console.file)
    return 1 if any(figure.verdict in ("FAILED", "MISSED") for figure in figures) else 0


def choose_shape(device: str) -> tuple[str, str]:
    """The 7B shape where there is room for it, else the 3B one, and why."""
    if device == "cpu":
        return "3b", "a processor is too slow"
    room = {
        "GB on the device": (torch.cuda.get_device_properties(device).total_memory, _DEVICE_BYTES),
        f"GB in {tempfile.gettempdir()}": (shutil.disk_usage(tempfile.gettempdir()).free, _DISK_BYTES),
    }
    lacks = [f"{there / 1e9:.0f} {what}, {need / 1e9:.0f} are needed" for what, (there, need) in room.items() if there < need]
    return ("3b", "; ".join(lacks)) if lacks else ("7b", "")


def _section(section: str, run: OwnRun, options: argparse.Namespace) -> Iterator[Figure]:
    """The figures of a section; any exception becomes one more figure."""
    try:
        yield from SECTIONS[section](run, options)
    except (OwnRunError, BenchError) as error:
        yield Figure(section=section, case=section, note=str(error))
    except Exception as error:
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        yield Figure(section=section, case=section, note=f"{type(error).__name__}: {error}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mmrt_lab.gpu.serve", description="Whole runs of mmrt on a GPU, through HTTP.")
    add = parser.add_argument
    add("--device", default="cuda", help="cuda, cuda:N; cpu tries the bench itself (%(default)s)")
    sections = [section for section in SECTIONS if section != "answers"]
    about = f"{', '.join(SECTIONS)} (all but answers, which the part works has)"
    add("--sections", nargs="+", choices=list(SECTIONS), default=sections, metavar="SECTION", help=about)
    add("--shape", choices=("tiny", "small", "3b", "7b"), help="of the model that is timed (7b where there is room for it, else 3b)")
    add("--model", type=Path, metavar="DIR", help="a checkpoint that is there already, instead")
    add("--quick", action="store_true", help="few requests and one kill of each actor")
    add("--limit", type=float, metavar="S", help="end after so many seconds with what there is")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    options.requests, options.trials = (8, 1) if options.quick else (64, 3)  # of each load; kills of each actor
    return options


def _device_name(device: str) -> str:
    return "cpu" if device == "cpu" else f"{device}, {torch.cuda.get_device_name(device)}"


def end_on_signals() -> None:
    """Clean up and write the results so far at SIGINT, even where it is ignored, as under nohup, at SIGTERM and at the time limit."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.default_int_handler)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
