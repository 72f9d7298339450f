"""The command: ``python -m mmrt_lab.gpu PART``. Touches the device only to read facts; parts work in processes of their own."""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from . import speed, works

LIMIT_S = 570.0  # of a part: less than ten minutes, its start included

_DESCRIPTION = """\
Three parts, each of at most ten minutes, in the order in which they are of use:

  works  whether all is right: facts of the machine, every kernel beside its reference, the tests that need a GPU, those of the kernels
         on the device, and a tiny model's answers beside those of the CPU
  speed  how fast the kernels are: as rates and as shares of what a copy or a matrix product reaches here
  serve  how fast whole runs are: load, streams beside pictures, kills, and transformers on the same device

PART.json is written anew with every figure: a part that is ended early leaves what it had. Tables come last. Settings of the card are
not changed. Ends with 1 where there is no CUDA device, a check, a test or a measurement failed, or a target was missed.
"""
_EPILOG = """\
Without installing: the package mmrt is the root of the source tree. In a checkout, .links/mmrt is a link to it:

    PYTHONPATH=.links:lab python3 -m mmrt_lab.gpu works

Where links were not copied, make one: mkdir .links && ln -s .. .links/mmrt

One section by itself; its rows are lines of JSON:

    PYTHONPATH=.links:lab python3 -m mmrt_lab.gpu.section paged_decode --rows rows.jsonl

Whole runs with other models, sections and sizes: python -m mmrt_lab.gpu.serve --help

Where wheels of what is missing lie beside the tree, say in wheels/, unpack them where nothing else is, and put that on the path, too:

    python3 -m pip install --no-index --no-deps --target packages wheels/*.whl
    PYTHONPATH=.links:lab:packages python3 -m mmrt_lab.gpu works

Needs torch 2.11 or later with CUDA, triton 3.6 or later, numpy, and a C compiler for Triton's launchers. FlashInfer, flash-attn and
FlashAttention 3 (flash_attn_interface) are used where they are installed. The section "video" needs PyNvVideoCodec and
the packages that mmrt decodes with; nvImageCodec for JPEGs. The tests need pytest, hypothesis and a checkout; answers and whole runs
all that mmrt needs. Whole runs are of the 7B shape where there are 40 GiB on the device and 20 GB for what passes (TMPDIR), else of
the 3B shape, for which there are no targets.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a part, print its tables, write its files. Returns the exit status that --help tells."""
    parser = argparse.ArgumentParser(
        prog="python -m mmrt_lab.gpu", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("works", "speed", "serve"), metavar="PART", help="works, speed or serve")
    parser.add_argument("--quick", action="store_true", help="speed: fewer sizes, no 3B shape; serve: few requests")
    about = "for PART.json (%(default)s)"
    parser.add_argument("--out", type=Path, default=Path("gpu-bench"), metavar="DIR", help=about)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: this bench needs a CUDA device, and torch sees none", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part == "speed":
        return speed.run(options.out, options.quick, LIMIT_S)
    missing = what_serving_lacks()
    if options.part == "works":
        return works.run(options.out, missing, LIMIT_S)
    return _serve(options.out, options.quick, missing)


def what_serving_lacks() -> str:
    """The reason why whole runs are impossible, or ""."""
    try:
        importlib.import_module(".serve", __package__)
        if importlib.util.find_spec(needed_on_cuda := "cuda.bindings") is None:
            return f"No module named {needed_on_cuda!r}"
    except ImportError as error:
        return str(error)
    return ""


def _serve(out: Path, quick: bool, missing: str) -> int:
    if missing:
        print(f"error: whole runs cannot be measured: {missing}", file=sys.stderr)
        return 1
    from . import serve

    serve.end_on_signals()
    return serve.main(["--json", str(out / "serve.json"), "--limit", str(LIMIT_S), *(["--quick"] if quick else [])])


if __name__ == "__main__":
    sys.exit(main())
