"""``mmrt bench profile``: measure the cost model of a checkpoint on this machine.

Starts a run without caches, drives the ``phases`` against it, and reads from its flight recorders what each stage did and when.
``fits`` makes lines and rates of that. The client runs on the same machine, as it does in ``mmrt bench serve``.
"""

import argparse
import asyncio
import os
import statistics
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from ...models.architecture import ModelConfig
from ...models.config import load_model_config
from ...runtime.config import RuntimeConfig
from ...runtime.config_sections import MemorySection, ModelSection, ServerSection
from ...runtime.errors import UserError
from ...runtime.observe.dumps import Recording
from ...runtime.observe.flight import FlightRecord, complete_since_ns, merge
from ...runtime.process.processors import read_processors
from ...runtime.process.run import read_run_info
from ...shm.errors import ShmError
from ...shm.run_directory import RunDirectory
from ..environment import read_environment
from ..output import Tell, open_console, progress
from ..own_run import OwnRun, OwnRunError, layout_argument, own_run
from ..processes import descendants
from ..render import show_environment, show_table
from ..serve.client import BenchError, find_model, open_session
from ..serve.load_options import number
from ..serve.options import parse_options
from ..serve.target import Target
from .answers import measure_answers
from .costs import Answers, Costs, save_costs
from .measured import Machine, fit
from .phases import Phase, drive, make_phases
from .seen import Seen

_TIMEOUT_S = 600.0
_MOST_MORE = 0.5  # of the phases: so often, disturbed ones are repeated


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
    add("--seconds", type=number("seconds", float, least=10), default=180.0, help="of all phases together (%(default)g)")
    add("--name", default="", help="of the cost model; default: that of the file")
    add("--out", type=Path, required=True, metavar="FILE", help="the cost model, in JSON")
    options = parser.parse_args(argv)
    if not options.out.parent.is_dir():
        parser.error(f"--out {options.out}: there is no folder {options.out.parent}")
    return options


def measure(options: argparse.Namespace, console: Console) -> Costs:
    """Start a run, drive it, and fit. Raises: BenchError, OwnRunError, ShmError, OSError, ValueError."""
    environment = read_environment()
    checkpoint = str(options.checkpoint.absolute()) if options.checkpoint else ""
    config = RuntimeConfig(
        model=ModelSection(path=checkpoint, dtype=options.dtype),
        server=ServerSection(port=0),
        memory=MemorySection(prefix_cache=False, embedding_cache=False),
    )
    if options.layout:
        config = msgspec.structs.replace(config, actors=msgspec.structs.replace(config.actors, layout=options.layout))
    with own_run() as run, progress(console) as tell:
        tell("starting a run")
        run.up(config)
        with RunDirectory.attach(run.run) as directory:
            info = read_run_info(directory)
        model = load_model_config(info.model_path, info.config.model.dtype, weights=info.config.model.weights)
        seen, answers = uvloop.run(_drive_all(run, model, options.seconds, tell))
    sections = {stage: info.config.actor(stage) for stage in ("video", "encoder", "prefill", "decode")}
    threads = {stage: section.threads for stage, section in sections.items()}
    nice = {stage: section.nice for stage, section in sections.items()}
    machine = Machine(environment, read_processors().num_cores, threads, nice)
    costs = fit(options.name or options.out.stem, model, machine, seen)
    return msgspec.structs.replace(costs, answers=answers)


async def _drive_all(run: OwnRun, model: ModelConfig, seconds: float, tell: Tell) -> tuple[list[Seen], Answers]:
    report = run.report()
    own = {os.getpid(), *descendants(report.supervisor_pid or 0)}
    shared = Counter(actor.pid for actor in report.actors)
    url, pids = report.endpoint, {actor.pid: actor.name for actor in report.actors if actor.pid and shared[actor.pid] == 1}
    seen = []
    async with open_session(_TIMEOUT_S) as session:
        target = Target(session, parse_options(["--url", url]), url, await find_model(session, url))
        await target.calibrate()
        tell("answers")
        answers = await measure_answers(target, model.media_kinds)
        phases = make_phases(model.media_kinds, model.max_context, seconds)
        num_more = round(_MOST_MORE * len(phases))
        for at, phase in enumerate(phases):
            tell(f"{phase.name}: {at + 1} of {len(phases)}, {phase.seconds:.0f} s")

            async def take(phase: Phase = phase) -> Seen:
                done = await drive(target, phase, pids, own)
                records = await asyncio.to_thread(_recorded, run.run, done.begin_ns)
                return Seen(done, [r for r in records if r.end_ns <= done.end_ns and r.time_ns >= done.begin_ns])

            one, num_taken = await undisturbed(take, num_more)
            num_more -= num_taken - 1
            seen.append(one)
    return seen, answers


async def undisturbed(take: Callable[[], Awaitable[Seen]], num_more: int) -> tuple[Seen, int]:
    """Take a phase, again while others disturb it, ``num_more`` times at most. Returns the least disturbed, and how many were taken."""
    taken = [await take()]
    while taken[-1].is_disturbed and len(taken) <= num_more:
        taken.append(await take())
    return min(taken, key=lambda one: one.run.others), len(taken)


def _recorded(run: Path, since_ns: int) -> list[FlightRecord]:
    """All records since then. Raises: BenchError if a recorder has lost some of them: what others did meanwhile would look as if it had
    been done alone."""
    with RunDirectory.attach(run) as directory:
        recorders = Recording.take(directory).recorders
    if (complete_ns := complete_since_ns(recorders)) > since_ns:
        raise BenchError(f"the flight recorders do not hold the first {(complete_ns - since_ns) / 1e9:.1f} s of a phase")
    return merge(recorders, since_ns)


def show(console: Console, costs: Costs) -> None:
    """Lines and rates."""
    if costs.environment is not None:
        show_environment(console, costs.environment)
    lines = {"prefill, tokens": costs.prefill, "decode, sequences": costs.decode}
    for work, table in (("analyse", costs.analyse), ("preprocess", costs.preprocess), ("encode", costs.encode)):
        lines |= {f"{work} {kind}": line for kind, line in table.items()}
    rows = [
        [name, f"{1e3 * line.fixed_s:.2f}", f"{1e6 * line.per_unit_s:.3g}", f"{1e9 * line.per_square_s:.3g}"]
        for name, line in lines.items()
    ]
    rows.append(["decode, tokens in KV cache", "", f"{1e6 * costs.decode_context_s:.3g}", ""])
    show_table(console, f"{costs.name}: time alone", ["", "ms fixed", "us per unit", "ns per square"], rows)
    rates = [
        [together, ", ".join(f"{stage} {rate:.2f}" for stage, rate in found.items())] for together, found in costs.interference.items()
    ]
    show_table(console, "rates together", ["at work", "share of the speed alone"], rates)
    times = []
    for name, seconds in msgspec.structs.asdict(costs.overheads).items():
        drawn = [getattr(delays, name, ()) for delays in (costs.alone, costs.beside)]
        times.append([name, f"{1e6 * seconds:.3g}", *(f"{1e6 * statistics.fmean(found):.3g}" if found else "" for found in drawn)])
    show_table(console, "elsewhere, us", ["", "typical", "mean alone", "mean beside decode"], times)


if __name__ == "__main__":
    sys.exit(main())
