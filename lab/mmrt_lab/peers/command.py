"""``mmrt bench peers``: prefill and decode steps of the language model, and llama.cpp's on the same weights, in turns.

Both sides hold the same numbers in formats of the same width, and compute the same tokens. Each has a process; they take turns within
each round, so that other work on the machine falls on both. Sampling and serving are left out on both sides.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from rich.console import Console

from mmrt.bench.environment import read_environment
from mmrt.bench.output import JSON_HELP, Tell, progress, run_bench
from mmrt.bench.render import show_table
from mmrt.bench.serve.errors import BenchError
from mmrt.models.architecture import ModelConfig, WeightFormat
from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.config import load_model_config
from mmrt.models.gguf.directory import gguf_directory
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import ModelSection
from mmrt.runtime.environment import read_environment as read_variables
from mmrt.runtime.process.number_format import has_bfloat16_units, plan_formats
from mmrt.runtime.supervisor.specs import child_environment

from ..extras import need_extra
from .figures import Pair, PeersBench, Times, figures_of, rows_of
from .gguf_file import check_shape, write_gguf
from .party import MAX_SEQUENCES, Child, Job, started

PEER_WEIGHTS: dict[WeightFormat, str] = {
    "float32": "F32",
    "bfloat16": "F16",
    "float16": "F16",
    "int8": "Q8_0",
    "int8g": "Q8_0",
    "int4": "Q4_0",
}
SEQUENCES = (0, 1, 4, MAX_SEQUENCES)  # of the jobs: 0 is prefill
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0; 1 without the extra, or when a side cannot load the model."""
    parser = argparse.ArgumentParser(
        prog="mmrt bench peers",
        description="Prefill and decode steps beside llama.cpp's on the same weights, in turns. Needs the extra peers.",
        epilog=f"mmrt keeps to the instructions that {', '.join(VARIABLES)} name; llama.cpp to those that it was built with.",
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="DIR", help="by default, one of shape small with random weights, made for the run")
    add("--file", type=Path, metavar="GGUF", help="a GGUF file of any family that both sides read, in place of a checkpoint")
    formats = "mmrt's formats, as model.weights; by default all, and with --file the one that a run keeps the file in"
    add("--weights", nargs="+", choices=tuple(PEER_WEIGHTS), help=formats)
    add("--threads", nargs="+", type=int, default=[1, 2], metavar="N", help="numbers of threads (%(default)s)")
    add("--rounds", type=int, default=5, help="each side does each job so many times (%(default)s)")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if options.rounds < 1 or min(options.threads) < 1:
        parser.error(f"--rounds {options.rounds} and --threads {options.threads}: each must be at least 1")
    bench = run_bench("peers", options.json, (BenchError, OSError, ValueError), lambda console: measure(options, console), show)
    return 1 if bench is None else 0


def measure(options: argparse.Namespace, console: Console) -> PeersBench:
    """All pairs, one after the other. Raises: BenchError, OSError, ValueError."""
    need_extra("peers", "llama_cpp", "gguf")
    environment = read_environment()
    jobs = [Job(num_sequences, num_threads) for num_threads, num_sequences in product(options.threads, SEQUENCES)]
    builds: dict[str, None] = {}
    pairs = []
    with tempfile.TemporaryDirectory(prefix="mmrt-peers-") as scratch, progress(console) as tell:
        found = _of_file if options.file is not None else _of_checkpoint
        for pair, its_builds in found(options, jobs, Path(scratch), tell):
            pairs.append(pair)
            builds |= dict.fromkeys(its_builds)
    return PeersBench(
        environment=environment,
        checkpoint=(options.file or options.checkpoint or Path("small")).name,
        num_rounds=options.rounds,
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        builds=[*builds],
        pairs=pairs,
    )


def _of_file(options: argparse.Namespace, jobs: Sequence[Job], scratch: Path, tell: Tell) -> Iterator[tuple[Pair, list[str]]]:
    """As ``measure_pair``, of a GGUF file."""
    checkpoint = gguf_directory(options.file, scratch)
    wanted: list[WeightFormat] = options.weights or ["auto"]
    for weights in wanted:
        config = in_format(checkpoint, weights)
        name = config.dtype if config.weights == "auto" else config.weights
        yield measure_pair(checkpoint, config, name, options.file, jobs, options.rounds, tell)


def _of_checkpoint(options: argparse.Namespace, jobs: Sequence[Job], scratch: Path, tell: Tell) -> Iterator[tuple[Pair, list[str]]]:
    """As ``measure_pair``, of files that are written of a checkpoint."""
    checkpoint = options.checkpoint or scratch / "small"
    if options.checkpoint is None:
        tell("making a checkpoint of shape small")
        make_checkpoint("small", checkpoint)
    wanted: list[WeightFormat] = options.weights or [*PEER_WEIGHTS]
    for weights in wanted:
        tell(f"{weights}: writing the weights in {PEER_WEIGHTS[weights]}")
        file = scratch / f"{PEER_WEIGHTS[weights]}.gguf"
        config = in_format(checkpoint, weights)
        if not file.exists():
            convert(checkpoint, file)
        yield measure_pair(checkpoint, config, weights, file, jobs, options.rounds, tell)


def in_format(checkpoint: Path, weights: WeightFormat) -> ModelConfig:
    """The configuration of a run with ``model.weights``, on this processor. Raises: CheckpointError."""
    wanted = RuntimeConfig(model=ModelSection(path=str(checkpoint), weights=weights))
    has_units = has_bfloat16_units(read_variables().cpu_capability)
    section = plan_formats(wanted, checkpoint, has_units, free_bytes=0)[0].model
    return load_model_config(checkpoint, section.dtype, weights=section.weights)


def convert(checkpoint: Path, file: Path) -> None:
    """Write a GGUF file in the format that is its name. Raises: BenchError, CheckpointError."""
    config = load_model_config(checkpoint, "float32")
    check_shape(config)
    write_gguf(file, config, read_weights(checkpoint, config), file.stem)


def measure_pair(
    checkpoint: Path, config: ModelConfig, weights: str, file: Path, jobs: Sequence[Job], num_rounds: int, tell: Tell
) -> tuple[Pair, list[str]]:
    """Both sides in turns, and their builds. Raises: BenchError."""
    ours = [str(checkpoint), config.dtype, config.weights]
    times = {job: Times([], []) for job in jobs}
    with started("own", ours, child_environment(os.environ)) as own, started("llama_cpp", [str(file)], os.environ) as peer:
        for number in range(num_rounds):
            tell(f"{weights} beside {file.stem}: round {number + 1} of {num_rounds}")
            take_turns(own, peer, times)
        pair = Pair(
            weights=weights,
            dtype=config.dtype,
            peer_weights=file.stem,
            correlation=float(np.corrcoef(own.hello.logits, peer.hello.logits)[0, 1]),
            figures=figures_of(weights, times),
        )
        return pair, [own.hello.build, peer.hello.build]


def take_turns(own: Child, peer: Child, times: dict[Job, Times]) -> None:
    """One round: each job on one side, then on the other."""
    for job, (own_times, peer_times) in times.items():
        own_times += own.do(job)
        peer_times += peer.do(job)


def show(console: Console, bench: PeersBench) -> None:
    """Builds and tables."""
    flags = [f"{name}={value}" for name, value in bench.variables.items()] or ["no limit of instructions"]
    for line in [*bench.builds, " ".join(flags)]:
        console.print(line, style="dim", soft_wrap=True, highlight=False)
    columns = ["", "threads", "mmrt ms", "CPU ms", "llama ms", "CPU ms", "ratio", "CPU ratio", "AVX2 goal"]
    for pair in bench.pairs:
        title = f"{pair.weights} in {pair.dtype} beside {pair.peer_weights}: medians of {bench.num_rounds} rounds"
        show_table(console, f"{title}; logits correlate by {pair.correlation:.4f}", columns, rows_of(pair))
