"""``mmrt bench followed``: one load in steps and bursts, live, on fixed layouts and on a layout that follows it (MS4, TI11).

Each system is a run of its own; the others are down meanwhile, for all would share the processors. The processes that the follower
starts are killed as they come, so that its changes are judged with deaths in them.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from mmrt.bench.environment import read_environment
from mmrt.bench.output import JSON_HELP, Tell, json_file, open_console, progress, write_json
from mmrt.bench.own_run import OwnRunError, layout_argument, own_run
from mmrt.bench.render import show_table
from mmrt.bench.serve.command import run_bench
from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.load_options import number
from mmrt.bench.serve.options import Options, parse_options
from mmrt.bench.serve.record import Record
from mmrt.bench.serve.slo import Slo
from mmrt.runtime.config.runtime_config import RuntimeConfig, convert_config, to_data
from mmrt.runtime.stage_table import DEFAULT_LAYOUT

from ..goodput.objective import Objective
from .run_watch import RunWatch, Taken
from .steps import trace_of

_LAYOUTS = ("E+P+D", "2E+2P+D", "2V+2E+2P+2D")
_FOLLOWS = "follows"


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """A load on one system. ``ttft_s``: P50 and P90 of the requests that went well."""

    system: str
    number: int
    num_requests: int
    num_failed: int
    attainment: float
    ttft_s: tuple[float, float]
    taken: Taken


class FollowedReport(msgspec.Struct, frozen=True, kw_only=True):
    """All rounds of ``mmrt bench followed``."""

    environment: dict[str, object]
    objective: str
    rounds: list[Round]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 1 where an answer was wrong or nothing could be measured."""
    given = make_parser().parse_args(sys.argv[1:] if argv is None else argv)
    console = open_console(given.json)
    objective = Objective(Slo(given.slo_ttft, given.slo_tbt))
    rounds: list[Round] = []
    try:
        with progress(console) as tell, tempfile.TemporaryDirectory(prefix="mmrt-followed-") as place:
            for at in range(given.rounds):
                trace = Path(place) / f"{at}.jsonl"
                trace.write_text(trace_of(given.seed + at, given.rate, given.times))
                systems = [*given.layouts, _FOLLOWS]
                for system in systems[at % len(systems) :] + systems[: at % len(systems)]:
                    rounds.append(_measure(system, at, trace, objective, given, tell))
    except (BenchError, OwnRunError, OSError, ValueError) as error:
        print(f"mmrt bench followed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mmrt bench followed: interrupted", file=sys.stderr)
        return 130
    environment = msgspec.to_builtins(read_environment())
    report = FollowedReport(environment=environment, objective=str(objective), rounds=rounds)
    show(console, report)
    write_json(given.json, report)
    return 1 if any(one.taken.num_wrong for one in rounds) else 0


def config_of(system: str, objective: Objective, most: int, calm_s: float, idle_cores: float = 0.5) -> RuntimeConfig:
    """The configuration of a system: a layout, or one that follows the load."""
    data = to_data(RuntimeConfig())
    data["server"]["port"] = 0
    data["slo"] = objective.sections
    data["memory"]["prefix_cache"] = data["memory"]["embedding_cache"] = False
    if system == _FOLLOWS:
        data["autoscale"] = {"enabled": True, "every_s": 1.0, "calm_s": calm_s, "most": most, "idle_cores": idle_cores}
    else:
        data["actors"]["layout"] = system
    return convert_config(data)


def _measure(system: str, number: int, trace: Path, objective: Objective, given: argparse.Namespace, tell: Tell) -> Round:
    """Serve the load. Raises: OwnRunError, BenchError, OSError, ValueError."""
    tell(f"round {number + 1} of {given.rounds}: {system}")
    load = parse_options(["--url", "http://-", "--trace", str(trace), "--scenario", "steady", "--seed", f"{number}"])
    with own_run(f"followed-{number}") as run, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        run.up(config_of(system, objective, given.most, given.calm, given.idle_cores))
        report = run.report()
        watch = RunWatch(run, report.endpoint, report.supervisor_pid or 0, kills=system == _FOLLOWS and not given.no_kills)
        records = runner.run(_serve(load, report.endpoint, watch))
    ttfts_s = sorted(record.ttft_s for record in records if record.is_success and record.ttft_s is not None)
    deciles = statistics.quantiles(ttfts_s, n=10, method="inclusive") if len(ttfts_s) > 1 else [0.0] * 9
    return Round(
        system=system,
        number=number,
        num_requests=len(records),
        num_failed=sum(not record.is_success for record in records),
        attainment=objective.attainment(records),
        ttft_s=(deciles[4], deciles[8]),
        taken=watch.taken,
    )


async def _serve(load: Options, url: str, watch: RunWatch) -> list[Record]:
    watching = asyncio.create_task(watch.watch())
    try:
        return (await run_bench(load, [url], Console(quiet=True)))[1]
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching  # raises what has ended it


def show(console: Console, report: FollowedReport) -> None:
    """Print a table: of each system the means of its rounds."""
    columns = ("system", "attained", "TTFT P50", "P90", "CPU s", "process s", "changes", "kills", "wrong", "failed")
    systems = list(dict.fromkeys(one.system for one in report.rounds))
    rows = [_row(system, [one for one in report.rounds if one.system == system]) for system in systems]
    show_table(console, f"{report.objective}; means of {len(report.rounds) // len(rows)} rounds", columns, rows)


def _row(system: str, rounds: Sequence[Round]) -> tuple[str, ...]:
    taken, mean = [one.taken for one in rounds], statistics.fmean
    return (
        system,
        f"{mean(one.attainment for one in rounds):.1%}",
        f"{mean(one.ttft_s[0] for one in rounds):.2f} s",
        f"{mean(one.ttft_s[1] for one in rounds):.2f} s",
        f"{mean(one.cpu_s for one in taken):.0f}",
        f"{mean(one.process_s for one in taken):.0f}",
        f"{sum(len(one.layouts) - 1 for one in taken)}",
        f"{sum(one.num_kills for one in taken)}",
        f"{sum(one.num_wrong for one in taken)} of {sum(one.num_asked for one in taken)}",
        f"{sum(one.num_failed for one in rounds)} of {sum(one.num_requests for one in rounds)}",
    )


def make_parser() -> argparse.ArgumentParser:
    """The layouts, the load, the objective and the bounds of the follower."""
    parser = argparse.ArgumentParser(
        prog="mmrt bench followed", description="One load in steps and bursts on fixed layouts, and on a layout that follows it."
    )
    add = parser.add_argument
    add("--layouts", type=_layouts, default=_LAYOUTS, metavar="L,…", help=f"fixed ones ({','.join(_LAYOUTS)})")
    add("--rounds", type=number("rounds", int, least=1), default=2, help="each system serves so many loads, in turn (%(default)s)")
    add("--rate", type=number("rate", float, above=0), default=1.0, metavar="X", help="times the load's usual rates")
    add("--times", type=number("times", float, above=0), default=1.0, metavar="X", help="the load's usual length")
    add("--seed", type=int, default=1)
    add("--slo-ttft", type=number("seconds", float, above=0), default=2.0, metavar="S")
    add("--slo-tbt", type=number("seconds", float, above=0), default=0.2, metavar="S")
    add("--most", type=number("processes", int, least=1), default=2, help="of a kind, where the layout follows (%(default)s)")
    add("--calm", type=number("seconds", float, least=1), default=15.0, metavar="S", help="before some leave (%(default)s)")
    add("--idle-cores", type=number("cores", float, least=0), default=0.5, metavar="N", help="with fewer none come (%(default)s)")
    add("--no-kills", action="store_true", help="kill no process that comes")
    add("--json", type=json_file, metavar="FILE", help=JSON_HELP)
    return parser


def _layouts(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(layout_argument, text.split(","))))


assert DEFAULT_LAYOUT in _LAYOUTS  # the follower begins with it

if __name__ == "__main__":
    sys.exit(main())
