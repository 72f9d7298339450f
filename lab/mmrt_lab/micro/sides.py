"""``mmrt bench sides``: what a person with a laptop notices, of several servers in turns.

The servers are up already: mmrt and peers, or two versions of mmrt, each a NAME=URL. They get the same requests, one server after the
other within each round, in an order that turns: so other work on the machine falls on all. A server that cannot do a load (pictures) is
left out of it, and said why.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from mmrt.bench.environment import Environment, read_environment
from mmrt.bench.output import JSON_HELP, Tell, progress, run_bench
from mmrt.bench.own_run import OwnRun, OwnRunError
from mmrt.bench.render import show_table
from mmrt.bench.serve.report import Distribution, Report, StallSummary

LOADS = {
    "one": "--concurrency 1 --num-requests 4 --input-tokens {tokens} --max-tokens 32",
    "four": "--concurrency 4 --num-requests 8 --input-tokens 64 --max-tokens 64",
    "pictures": "--scenario stall --streams 4 --fresh-interval 5 --num-requests 3 --image-size 336x336 --phase {phase}",
    "mixed": "--scenario mixed --modality text:3,image:1 --concurrency 4 --num-requests 12 --image-size 336x336 --max-tokens 32",
}
"""Options of ``mmrt bench serve``."""

Figure = tuple[str, str, Callable[[Report], float]]
FIGURES: tuple[Figure, ...] = (
    ("one request: TTFT, ms", "one", lambda report: 1e3 * _of(report.groups[0].ttft).p50),
    ("one request: mean TBT, ms", "one", lambda report: 1e3 * _of(report.groups[0].tbt).mean),
    ("four streams: mean TBT, ms", "four", lambda report: 1e3 * _of(report.groups[0].tbt).mean),
    ("four streams: tokens/s", "four", lambda report: report.groups[0].output_tokens_per_s),
    ("four streams beside pictures: TBT P99, ms", "pictures", lambda report: 1e3 * _of(_stall(report).with_fresh).p99),
    ("a picture beside four streams: TTFT, ms", "pictures", lambda report: 1e3 * _of(_stall(report).fresh_ttft).p50),
    ("texts and pictures: tokens/s", "mixed", lambda report: report.groups[0].output_tokens_per_s),
)
"""The name of each, its load, and its value in a report."""


class SidesBench(msgspec.Struct, frozen=True, kw_only=True):
    """``values``: of each figure and server, by round. ``loads``: average number of processes that wanted a processor, by round."""

    environment: Environment
    urls: dict[str, str]
    values: dict[str, dict[str, list[float]]]
    failures: dict[str, str]
    loads: list[float]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0; 1 if no server can be measured."""
    parser = argparse.ArgumentParser(prog="mmrt bench sides", description="Servers that are up, in turns: what one user notices.")
    add = parser.add_argument
    add("sides", nargs="+", metavar="NAME=URL", type=_side, help="the first is what the others are compared with")
    add("--rounds", type=int, default=3, help="of each load and server (%(default)s)")
    add("--loads", nargs="+", choices=tuple(LOADS), default=[*LOADS], help="which (all)")
    add("--tokens", type=int, default=500, help="of the prompt of one request (%(default)s)")
    add("--phase", type=float, default=8.0, help="seconds of the streams alone (%(default)s)")
    add("--new-connections", action="store_true", help="a connection for each request: for servers that close kept ones unsaid")
    add("--no-extensions", action="store_true", help="send only what OpenAI has: for servers that refuse ignore_eos")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.tokens < 1:
        parser.error(f"--rounds {options.rounds} and --tokens {options.tokens}: each must be at least 1")
    urls = dict(options.sides)
    if len(urls) < len(options.sides):
        parser.error("two servers have one name")
    lines = {name: LOADS[name].format(tokens=options.tokens, phase=options.phase).split() for name in options.loads}
    given = {"--no-extensions": options.no_extensions, "--new-connections": options.new_connections}
    more = [option for option, is_given in given.items() if is_given]

    def run(console: Console) -> SidesBench:
        with tempfile.TemporaryDirectory() as home, progress(console) as tell:
            return measure(
                OwnRun(Path(home), Path(home) / "run"),
                urls,
                {name: [*line, *more] for name, line in lines.items()},
                options.rounds,
                tell,
            )

    bench = run_bench("sides", options.json, (OwnRunError, OSError), run, show)
    return 0 if bench is not None else 1


def _side(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not name or not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL, as mmrt=http://127.0.0.1:8000")
    return name, url


def measure(client: OwnRun, urls: Mapping[str, str], lines: Mapping[str, Sequence[str]], num_rounds: int, tell: Tell) -> SidesBench:
    """Everything; ``client`` runs ``mmrt bench serve``. Raises: OwnRunError where no server can do any load."""
    values: dict[str, dict[str, list[float]]] = {figure: {side: [] for side in urls} for figure, load, _ in FIGURES if load in lines}
    failures: dict[str, str] = {}
    loads = []
    for number in range(num_rounds):
        for load, line in lines.items():
            for side in list(urls)[:: -1 if number % 2 else 1]:
                if f"{side}, {load}" in failures:
                    continue
                tell(f"round {number + 1} of {num_rounds}: {load}, {side}")
                try:
                    report = _report(client, [*line, "--url", urls[side], "--seed", str(number + 1)])
                    for figure, of_load, value in FIGURES:
                        if of_load == load:
                            values[figure][side].append(value(report))
                except OwnRunError as error:
                    failures[f"{side}, {load}"] = str(error)
        loads.append(os.getloadavg()[0])
    if not any(its for sides in values.values() for its in sides.values()):
        raise OwnRunError("; ".join(f"{what}: {why}" for what, why in failures.items()))
    return SidesBench(environment=read_environment(), urls=dict(urls), values=values, failures=failures, loads=loads)


def _report(client: OwnRun, options: Sequence[str]) -> Report:
    file = client.home / "report.json"
    client.command("bench", "serve", "--json", str(file), *options)
    return msgspec.json.decode(file.read_bytes(), type=Report)


def _stall(report: Report) -> StallSummary:
    if report.stall is None:
        raise OwnRunError("the report has no phases")
    return report.stall


def _of(distribution: Distribution | None) -> Distribution:
    if distribution is None:
        raise OwnRunError("no request of the load went well")
    return distribution


def show(console: Console, bench: SidesBench) -> None:
    first, *others = bench.urls
    rows = []
    for figure, sides in bench.values.items():
        median = {side: statistics.median(its) if its else None for side, its in sides.items()}
        base = median[first]
        ratios = ["–" if base is None or not (value := median[side]) else f"{base / value:.2f}" for side in others]
        rows.append([figure, *("–" if value is None else f"{value:.1f}" for value in median.values()), *ratios])
    load = ", ".join(f"{value:.1f}" for value in bench.loads)
    show_table(console, f"medians; load average {load}", ["figure", *bench.urls, *(f"{first} over {side}" for side in others)], rows)
    for what, why in bench.failures.items():
        console.print(f"{what}: {why}")
