"""``python -m mmrt.bench.gpu.serve``: whole runs on this machine's GPU, through HTTP: the same answers, how fast, and how soon again.

Needs all that mmrt needs, where the kernels' bench needs torch and Triton alone; that bench starts this one at its end.
"""

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from ..client import BenchError
from ..environment import Environment, read_environment
from ..output import JSON_HELP, STANDARD_OUTPUT, open_console, write_json
from ..own_run import OwnRun, OwnRunError, own_run
from ..render import show_environment
from .report import format_table
from .whole_runs import SECTIONS, Figure

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
    console = open_console(options.json)
    figures: list[Figure] = []
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


def _section(section: str, run: OwnRun, options: argparse.Namespace) -> Iterator[Figure]:
    """What a section finds; whatever is raised is one more figure."""
    try:
        yield from SECTIONS[section](run, options)
    except (OwnRunError, BenchError) as error:
        yield Figure(section=section, case=section, note=str(error))
    except Exception as error:
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        yield Figure(section=section, case=section, note=f"{type(error).__name__}: {error}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mmrt.bench.gpu.serve", description="Whole runs of mmrt on a GPU, through HTTP.")
    add = parser.add_argument
    add("--device", default="cuda", help="cuda, cuda:N; cpu tries the bench itself (%(default)s)")
    add("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    add("--shape", choices=("tiny", "small", "3b", "7b"), default="3b", help="of the model that is timed; 7b: 17 GB (%(default)s)")
    add("--model", type=Path, metavar="DIR", help="a checkpoint that is there already, instead")
    add("--requests", type=int, default=64, help="of each load (%(default)s)")
    add("--trials", type=int, default=3, help="kills of each actor (%(default)s)")
    add("--quick", action="store_true", help="few requests and one kill of each actor")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if options.quick:
        options.requests, options.trials = min(options.requests, 8), 1
    if options.requests < 1 or options.trials < 1:
        parser.error("--requests and --trials must be at least 1")
    return options


def _device_name(device: str) -> str:
    return "cpu" if device == "cpu" else f"{device}, {torch.cuda.get_device_name(device)}"


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # also where SIGINT is ignored, as behind nohup
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
