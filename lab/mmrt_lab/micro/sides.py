"""``mmrt bench sides``: what a person with a laptop notices, of several servers in turns.

The servers are up already: mmrt and peers, or two versions of mmrt, each a NAME=URL. They get the same requests, one server after the
other within each round, in an order that turns: so other work on the machine falls on all. A server that cannot do a load (pictures) is
left out of it, and said why.
"""

import argparse
import os
import secrets
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

Value = Callable[[Report], float]


class Load(msgspec.Struct, frozen=True):
    """``line``: options of ``mmrt bench serve``. ``figures``: of its report, by name. In both, ``{tokens}`` are the prompt's."""

    line: str
    figures: dict[str, Value]


LOADS = {
    "one": Load(
        "--concurrency 1 --num-requests 4 --input-tokens {tokens} --max-tokens 32",
        {
            "one request of {tokens} tokens: TTFT, ms": lambda report: 1e3 * _of(report.groups[0].ttft).p50,
            "one request of {tokens} tokens: mean TBT, ms": lambda report: 1e3 * _of(report.groups[0].tbt).mean,
        },
    ),
    "picture": Load(
        "--modality image --concurrency 1 --num-requests 4 --image-size 336x336 --input-tokens 16 --max-tokens 8",
        {
            "one picture: TTFT, ms": lambda report: 1e3 * _of(report.groups[0].ttft).p50,
            "one picture: tokens of a prompt": lambda report: _prompt_tokens(report),
        },
    ),
    "clip": Load(
        "--modality audio --concurrency 1 --num-requests 4 --audio-seconds 10 --input-tokens 16 --max-tokens 8",
        {
            "one clip of 10 s: TTFT, ms": lambda report: 1e3 * _of(report.groups[0].ttft).p50,
            "one clip of 10 s: tokens of a prompt": lambda report: _prompt_tokens(report),
        },
    ),
    "four": Load(
        "--concurrency 4 --num-requests 8 --input-tokens 64 --max-tokens 64",
        {
            "four streams: mean TBT, ms": lambda report: 1e3 * _of(report.groups[0].tbt).mean,
            "four streams: tokens/s": lambda report: report.groups[0].output_tokens_per_s,
        },
    ),
    "pictures": Load(
        "--scenario stall --streams 4 --fresh-interval 5 --num-requests 3 --image-size 336x336 --phase {phase}",
        {
            "four streams beside pictures: TBT P99, ms": lambda report: 1e3 * _of(_stall(report).with_fresh).p99,
            "a picture beside four streams: TTFT, ms": lambda report: 1e3 * _of(_stall(report).fresh_ttft).p50,
        },
    ),
    "mixed": Load(
        "--scenario mixed --modality text:3,image:1 --concurrency 4 --num-requests 12 --image-size 336x336 --max-tokens 32",
        {"texts and pictures: tokens/s": lambda report: report.groups[0].output_tokens_per_s},
    ),
}


def loads_of(names: Sequence[str], tokens: Sequence[int], phase_s: float) -> dict[str, Load]:
    """The loads by name, without gaps in their texts: one for each number of tokens where the load has them."""
    loads = {}
    for name in names:
        load = LOADS[name]
        for its_tokens in tokens if "{tokens}" in load.line else (0,):
            figures = {figure.format(tokens=its_tokens): value for figure, value in load.figures.items()}
            line = load.line.format(tokens=its_tokens, phase=phase_s)
            loads[f"{name} of {its_tokens} tokens" if its_tokens else name] = Load(line, figures)
    return loads


class SidesBench(msgspec.Struct, frozen=True, kw_only=True):
    """``first_seed``: of the first round's first load; each later load has the next one. ``values``: of each figure and server, by
    round. ``loads``: average number of processes that wanted a processor, by round."""

    environment: Environment
    urls: dict[str, str]
    first_seed: int
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
    add("--tokens", nargs="+", type=int, default=[500], metavar="N", help="of the prompt of one request, one load each (%(default)s)")
    add("--phase", type=float, default=8.0, help="seconds of the streams alone (%(default)s)")
    add("--new-connections", action="store_true", help="a connection for each request: for servers that close kept ones unsaid")
    add("--no-extensions", action="store_true", help="send only what OpenAI has: for servers that refuse ignore_eos")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if min(options.rounds, *options.tokens) < 1:
        parser.error(f"--rounds {options.rounds} and --tokens {options.tokens}: each must be at least 1")
    urls = dict(options.sides)
    if len(urls) < len(options.sides):
        parser.error("two servers have one name")
    loads = loads_of(options.loads, options.tokens, options.phase)
    given = {"--no-extensions": options.no_extensions, "--new-connections": options.new_connections}
    more = [option for option, is_given in given.items() if is_given]

    def run(console: Console) -> SidesBench:
        with tempfile.TemporaryDirectory() as home, progress(console) as tell:
            return measure(OwnRun(Path(home), Path(home) / "run"), urls, loads, more, options.rounds, tell)

    bench = run_bench("sides", options.json, (OwnRunError, OSError), run, show)
    return 0 if bench is not None else 1


def _side(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not name or not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL, as mmrt=http://127.0.0.1:8000")
    return name, url


def measure(
    client: OwnRun, urls: Mapping[str, str], loads: Mapping[str, Load], more: Sequence[str], num_rounds: int, tell: Tell
) -> SidesBench:
    """Everything; ``client`` runs ``mmrt bench serve``, with the options ``more`` for each load. Each load of each round has a seed
    of its own, drawn anew in each run: no prompt begins as an earlier one that a server still caches. Raises: OwnRunError where no
    server can do any load."""
    figures = [figure for load in loads.values() for figure in load.figures]
    values: dict[str, dict[str, list[float]]] = {figure: {side: [] for side in urls} for figure in figures}
    first_seed = secrets.randbelow(1 << 31)
    failures: dict[str, str] = {}
    averages = []
    for number in range(num_rounds):
        for place, (name, load) in enumerate(loads.items()):
            seed = first_seed + number * len(loads) + place
            for side in list(urls)[:: -1 if number % 2 else 1]:
                if f"{side}, {name}" in failures:
                    continue
                tell(f"round {number + 1} of {num_rounds}: {name}, {side}")
                try:
                    report = _report(client, [*load.line.split(), *more, "--url", urls[side], "--seed", str(seed)])
                    for figure, value in load.figures.items():
                        values[figure][side].append(value(report))
                except OwnRunError as error:
                    failures[f"{side}, {name}"] = str(error)
        averages.append(os.getloadavg()[0])
    if not any(its for sides in values.values() for its in sides.values()):
        raise OwnRunError("; ".join(f"{what}: {why}" for what, why in failures.items()))
    return SidesBench(
        environment=read_environment(), urls=dict(urls), first_seed=first_seed, values=values, failures=failures, loads=averages
    )


def _report(client: OwnRun, options: Sequence[str]) -> Report:
    file = client.home / "report.json"
    client.command("bench", "serve", "--json", str(file), *options)
    return msgspec.json.decode(file.read_bytes(), type=Report)


def _prompt_tokens(report: Report) -> float:
    """Mean; of a server that does not say it, 0."""
    return report.groups[0].num_input_tokens / (report.groups[0].num_requests - report.groups[0].num_failed or 1)


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
