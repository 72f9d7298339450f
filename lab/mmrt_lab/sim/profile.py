"""``mmrt bench profile``: measure the cost model of a checkpoint on this machine."""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from mmrt.bench.output import open_console, progress
from mmrt.bench.own_run import OwnRunError, layout_argument, own_run
from mmrt.bench.render import show_environment, show_table
from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.load_options import number
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import ModelSection, SchedulingSection
from mmrt.runtime.errors import UserError
from mmrt.shm.errors import ShmError

from .costs import Costs, save_costs
from .options import cost_file
from .profiling import PASS_S, Profiling

_NUM_PASSES = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    options = parse_profile(sys.argv[1:] if argv is None else argv)
    console = open_console(None)
    try:
        costs = measure(options, console)
        save_costs(options.out, costs)
    except (BenchError, OwnRunError, UserError, ShmError, OSError, ValueError) as error:
        print(f"mmrt bench profile: {error}", file=sys.stderr)
        return 1
    show(console, costs)
    return 0


def parse_profile(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Exits with status 2 and a message for a bad one."""
    parser = argparse.ArgumentParser(
        prog="mmrt bench profile",
        description="Measure how long each stage works, alone and beside others: the cost model of mmrt bench sim.",
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="DIR", help="default: the demo model")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    add("--layout", type=layout_argument, metavar="LAYOUT", help="of the run that is measured (E+P+D)")
    add("--seconds", type=number("seconds", float, least=10), default=_NUM_PASSES * PASS_S, help="of all phases together (%(default)g)")
    add("--name", default="", help="of the cost model; default: that of the file")
    add("--out", type=cost_file, required=True, metavar="FILE", help="the cost model, in JSON")
    return parser.parse_args(argv)


def measure(options: argparse.Namespace, console: Console) -> Costs:
    """Start a run, drive it, and fit. Raises: BenchError, OwnRunError, ShmError, OSError, ValueError."""
    checkpoint = str(options.checkpoint.absolute()) if options.checkpoint else ""
    one_by_one = SchedulingSection(prompt_lookup=False)  # a step is a token of each row
    config = RuntimeConfig(model=ModelSection(path=checkpoint, dtype=options.dtype), scheduling=one_by_one)
    if options.layout:
        config = msgspec.structs.replace(config, actors=msgspec.structs.replace(config.actors, layout=options.layout))
    with own_run() as run, progress(console) as tell:
        profiling = Profiling(run, config, tell)
        for number in range(_NUM_PASSES):
            tell(f"pass {number + 1} of {_NUM_PASSES}")
            profiling.take_pass(options.seconds / _NUM_PASSES)
    return profiling.costs(options.name or options.out.stem)


def show(console: Console, costs: Costs) -> None:
    """Lines and rates."""
    if costs.environment is not None:
        show_environment(console, costs.environment)
    lines = {"prefill, tokens": costs.prefill}
    for work, table in (("analyse", costs.analyse), ("preprocess", costs.preprocess), ("encode", costs.encode)):
        lines |= {f"{work} {kind}": line for kind, line in table.items()}
    rows = [
        [name, f"{1e3 * line.fixed_s:.2f}", f"{1e6 * line.per_unit_s:.3g}", f"{1e9 * line.per_square_s:.3g}", _units(line.saturation)]
        for name, line in lines.items()
    ]
    rows += [[f"decode, {count:g} sequences", f"{1e3 * seconds:.2f}", "", "", ""] for count, seconds in costs.decode.points]
    rows.append(["decode, sequences", "", "", "", _units(costs.decode.saturation)])
    rows.append(["decode, after a pause", f"{1e3 * costs.decode_wake_s:.2f}", "", "", ""])
    rows.append(["decode, tokens in KV cache", "", f"{1e6 * costs.decode_context_s:.3g}", "", ""])
    show_table(console, f"{costs.name}: time alone", ["", "ms fixed", "us per unit", "ns per square", "saturates at, units"], rows)
    rates = [
        [together, ", ".join(f"{stage} {rate:.2f}" for stage, rate in found.items())] for together, found in costs.interference.items()
    ]
    show_table(console, "rates together", ["at work", "share of the speed alone"], rates)
    times = []
    for name, seconds in msgspec.structs.asdict(costs.overheads).items():
        drawn = [getattr(delays, name, ()) for delays in (costs.alone, costs.beside)]
        times.append([name, f"{1e6 * seconds:.3g}", *(f"{1e6 * statistics.fmean(found):.3g}" if found else "" for found in drawn)])
    show_table(console, "elsewhere, us", ["", "typical", "mean alone", "mean beside decode"], times)


def _units(number: float | None) -> str:
    return "" if number is None else f"{number:.3g}"


if __name__ == "__main__":
    sys.exit(main())
