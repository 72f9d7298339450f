"""``mmrt bench cores``: what a stage gains from cores that others leave idle (``most_threads``).

Two runs of one model in the default configuration, with idle cores lent and without, get the same requests in turns: a text alone, a
picture alone, and four streams, first alone and then beside pictures. Decode guesses tokens as it does by default, so several can come
at once: what counts is the mean time between them.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from mmrt.bench.environment import Environment, read_environment
from mmrt.bench.output import JSON_HELP, progress, run_bench
from mmrt.bench.own_run import OwnRun, OwnRunError, own_run
from mmrt.bench.render import show_table
from mmrt.bench.serve.report import Distribution, Report, StallSummary
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import ModelSection, ServerSection, SharingSection
from mmrt.runtime.process.processors import plan_threads, read_processors
from mmrt.runtime.stage_table import STAGES

_ALONE = "--concurrency 1 --num-requests 3 --max-tokens 2"
_BESIDE = "--scenario stall --streams 4 --max-tokens 1024 --fresh-interval 5 --num-requests 3"
LOADS = {
    "text": f"{_ALONE} --input-tokens {{tokens}}",
    "picture": f"{_ALONE} --modality image --input-tokens 16 --image-size {{size}}",
    "streams": f"{_BESIDE} --phase {{phase}} --image-size 336x336",
}
"""Options of ``mmrt bench serve``."""

FIGURES: dict[str, tuple[str, Callable[[Report], float]]] = {
    "a text alone: TTFT": ("text", lambda report: _p50(report.groups[0].ttft)),
    "a picture alone: TTFT": ("picture", lambda report: _p50(report.groups[0].ttft)),
    "four streams alone: mean TBT": ("streams", lambda report: _of(_stall(report).alone).mean),
    "four streams beside pictures: mean TBT": ("streams", lambda report: _of(_stall(report).with_fresh).mean),
    "four streams beside pictures: TBT P99": ("streams", lambda report: _of(_stall(report).with_fresh).p99),
    "a picture beside four streams: TTFT": ("streams", lambda report: _p50(_stall(report).fresh_ttft)),
}
"""The load of each, and its seconds in a report."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of each round, without idle cores and with them."""

    name: str
    own: list[float]
    lent: list[float]

    @property
    def ratio(self) -> float:
        """The median; not a number where tokens came several at a time, so that one took no time."""
        return statistics.median(there / here if here else math.nan for here, there in zip(self.own, self.lent, strict=True))


class CoresBench(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    model: str
    figures: list[Figure]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0; 1 if the runs cannot be had."""
    parser = argparse.ArgumentParser(prog="mmrt bench cores", description="What a stage gains from cores that others leave idle.")
    add = parser.add_argument
    add("model", nargs="?", default="", help="a checkpoint's directory or a GGUF file; the demo model")
    add("--rounds", type=int, default=3, help="of each load and run; one takes about 2 minutes with small (%(default)s)")
    add("--tokens", type=int, default=1010, help="of the text (%(default)s)")
    add("--size", default="672x672", help="of the picture alone (%(default)s)")
    add("--phase", type=float, default=8.0, help="seconds of the streams alone (%(default)s)")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.tokens < 1:
        parser.error("--rounds and --tokens must be at least 1")
    wanted = {"tokens": options.tokens, "size": options.size, "phase": options.phase}

    def run(console: Console) -> CoresBench:
        return measure(console, options.model, options.rounds, wanted)

    bench = run_bench("cores", options.json, (OwnRunError, OSError), run, show)
    return 0 if bench is not None else 1


def measure(console: Console, model: str, num_rounds: int, wanted: dict[str, object]) -> CoresBench:
    """Everything. Raises: OwnRunError, OSError."""
    path = str(Path(model).resolve()) if model else ""
    config = RuntimeConfig(model=ModelSection(path=path), server=ServerSection(port=0))
    with progress(console) as tell, own_run("own") as own, own_run("lent") as lent:
        for run, its in ((own, _without_idle_cores(config)), (lent, config)):
            tell("starting a run")
            run.up(its)
        found: dict[tuple[str, OwnRun], list[float]] = {(name, run): [] for name in FIGURES for run in (own, lent)}
        for number in range(num_rounds):
            for load, line in LOADS.items():
                for run in (own, lent) if number % 2 else (lent, own):
                    tell(f"round {number + 1} of {num_rounds}: {load}, {'own' if run is own else 'lent'}")
                    report = _report(run, [*line.format_map(wanted).split(), "--seed", str(number)])
                    for name, (of_load, seconds) in FIGURES.items():
                        if of_load == load:
                            found[name, run].append(seconds(report))
        figures = [Figure(name=name, own=found[name, own], lent=found[name, lent]) for name in FIGURES]
        return CoresBench(environment=read_environment(), model=model or "the demo model", figures=figures)


def _without_idle_cores(config: RuntimeConfig) -> RuntimeConfig:
    planned = plan_threads(config, read_processors()).actors
    sections = {name: getattr(planned, name) for name, stage in STAGES.items() if stage.has_device}
    own = {name: SharingSection(threads=section.threads, nice=section.nice) for name, section in sections.items()}
    return msgspec.structs.replace(config, actors=msgspec.structs.replace(config.actors, **own))


def _stall(report: Report) -> StallSummary:
    if report.stall is None:
        raise OwnRunError("the report has no phases")
    return report.stall


def _p50(distribution: Distribution | None) -> float:
    return _of(distribution).p50


def _of(distribution: "Distribution | None") -> Distribution:
    if distribution is None:
        raise OwnRunError("no request of a load went well")
    return distribution


def _report(run: OwnRun, options: Sequence[str]) -> Report:
    file = run.home / "report.json"
    run.command("bench", "serve", "--json", str(file), *options)
    return msgspec.json.decode(file.read_bytes(), type=Report)


def show(console: Console, bench: CoresBench) -> None:
    rows = [
        [
            figure.name,
            *(", ".join(f"{1000 * seconds:.0f}" for seconds in times) for times in (figure.own, figure.lent)),
            f"{figure.ratio:.2f}",
        ]
        for figure in bench.figures
    ]
    show_table(console, f"ms of each round, {bench.model}", ["figure", "own cores", "idle ones too", "ratio"], rows)
