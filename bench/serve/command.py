"""``mmrt bench serve``: drive any OpenAI-compatible server with a seeded workload; tables, JSON and a picture of what came of it.

Wires the parts together: ``workload`` plans, ``drivers``, ``stall`` and ``chat`` time, ``client`` sends, ``report`` computes. One
process, one event loop. Bodies are made before the clock runs (a chat's between its turns), so that the client needs little processor
while it measures.
"""

import asyncio
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console
from rich.progress import Progress

from ...runtime.config.runtime_config import RuntimeConfig
from ...runtime.config.sections import MemorySection, ModelSection, ServerSection
from ...runtime.process.run import running
from ...runtime.supervisor.ask_key import server_key
from ...shm.run_directory import RunDirectory
from ..environment import read_environment
from ..output import open_console, progress, write_json
from ..own_run import OwnRunError, own_run
from ..render import show_report
from .chat import make_conversations, run_alternated, run_chat
from .client import find_model, open_session
from .drivers import Notice, run_closed_loop, run_open_loop
from .errors import BenchError
from .load_options import settings_of
from .options import Options, parse_options
from .planned import plan_requests, plan_stall
from .plot import PlotError, plot_run, require_matplotlib
from .record import Record
from .report import Report, count_failures, distribution, duration_of, summarise_chat, summarise_groups, summarise_slo, summarise_stall
from .stall import STREAM_GROUP, StallRun, run_stall
from .target import Target
from .workload import RequestPlan


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 1 when a request failed or nothing could be measured."""
    options = parse_options(sys.argv[1:] if argv is None else argv)
    console = open_console(options.json)
    try:
        if options.plot:
            require_matplotlib()
        options = _of_the_run(options)
        with _servers(options, console) as urls, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report, records, stall = runner.run(run_bench(options, urls, console))
        show_report(console, report)
        write_results(options, report, records, stall)
    except (BenchError, OwnRunError, PlotError, OSError, ValueError) as error:
        print(f"mmrt bench serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mmrt bench serve: interrupted", file=sys.stderr)
        return 130
    return 1 if report.failures else 0


def _of_the_run(options: Options) -> Options:
    """Put the address and the key of the run that is up here into options that name no server. Raises: RunError if none is."""
    if options.url or options.compare_caches is not None:
        return options
    path = RunDirectory.default_path()
    info = running(path, ", or name a server with --url")
    return msgspec.structs.replace(options, url=info.endpoint, api_key=options.api_key or server_key(path, info))


@contextmanager
def _servers(options: Options, console: Console) -> Iterator[list[str]]:
    """The server's URL; or those of two runs of our own, with the caches and without. Raises: OwnRunError."""
    if options.compare_caches is None:
        yield [options.url]
        return
    checkpoint = str(Path(options.compare_caches).absolute()) if options.compare_caches else ""
    with ExitStack() as stack:
        urls = []
        for has_caches in (True, False):
            memory = MemorySection(prefix_cache=has_caches, embedding_cache=has_caches)
            config = RuntimeConfig(model=ModelSection(path=checkpoint), server=ServerSection(port=0), memory=memory)
            run = stack.enter_context(own_run("caches" if has_caches else "no-caches"))
            with progress(console) as tell:
                tell(f"starting a run {'with' if has_caches else 'without'} caches")
                run.up(config)
            urls.append(run.report().endpoint)
        yield urls


async def run_bench(options: Options, urls: Sequence[str], console: Console) -> tuple[Report, list[Record], StallRun | None]:
    """Plan, warm up, measure, and compute. ``urls``: a server, or two whose caches are compared. Raises: BenchError, OSError,
    ValueError."""
    plans = plan_requests(options)
    environment = read_environment()
    async with open_session(options.timeout_s, options.api_key, keeps_connections=options.keeps_connections) as session:
        targets = [Target(session, options, url, options.model or await find_model(session, url)) for url in urls]
        for target in targets:
            await target.calibrate()
            await target.warm_up(plans)
        stall: StallRun | None = None
        if options.scenario == "stall":
            stall = await _measure_stall(targets[0], plans, console)
            records = stall.records
        elif options.scenario == "chat":
            records = await _measure_chat(targets, plans, console)
        else:
            records = await _measure(targets[0], plans, console)
    report = Report(
        scenario=options.dataset.name if options.dataset else options.workload or options.scenario,
        model=targets[0].model,
        settings=settings_of(options),
        environment=environment,
        duration_s=duration_of(records),
        groups=summarise_groups(records),
        failures=count_failures(records),
        lag=distribution(record.lag_s for record in records if record.sent_s),
        stall=summarise_stall(stall) if stall else None,
        chat=summarise_chat(records) if options.scenario == "chat" else None,
        slo=summarise_slo(records, options.slo) if options.slo else None,
    )
    return report, records, stall


async def _measure(target: Target, plans: Sequence[RequestPlan], console: Console) -> list[Record]:
    target.prepare(plans)
    with _progress(console, len(plans)) as notice, _quiet_collector():
        if target.options.rate is None and target.options.trace is None:
            return await run_closed_loop(plans, target.options.concurrency, target.send, notice)
        return await run_open_loop(plans, target.send, notice)


async def _measure_chat(targets: Sequence[Target], plans: Sequence[RequestPlan], console: Console) -> list[Record]:
    options = targets[0].options
    conversations = make_conversations(plans, options.num_turns, targets[0].message)
    with _progress(console, len(plans) * len(targets)) as notice, _quiet_collector():
        if len(targets) == 2:
            return await run_alternated(conversations, targets[0].ask, targets[1].ask, notice)
        return await run_chat(conversations, options.concurrency, targets[0].ask, notice)


async def _measure_stall(target: Target, fresh: Sequence[RequestPlan], console: Console) -> StallRun:
    plan, texts = plan_stall(target.options, fresh)
    target.prepare([*fresh, *texts])
    with _progress(console, len(fresh)) as notice, _quiet_collector():

        def notice_fresh(record: Record) -> None:
            if record.group != STREAM_GROUP:
                notice(record)

        return await run_stall(plan, lambda number: texts[number % len(texts)], target.send, notice_fresh)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Notice]:
    """A bar on a terminal, nothing elsewhere."""
    with Progress(console=console, transient=True, refresh_per_second=2, disable=not console.is_terminal) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda record: progress.advance(task)


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """No garbage collection pauses in the measured times."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def write_results(options: Options, report: Report, records: Sequence[Record], stall: StallRun | None) -> None:
    """Write what was asked for. Raises: OSError; PlotError."""
    write_json(options.json, report)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(options.out / "report.json", report)
        (options.out / "records.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(records))
    if options.plot:
        path = options.out / options.plot if options.out else options.plot
        plot_run(path, f"{report.scenario}: {report.model}", records, stall)


if __name__ == "__main__":
    sys.exit(main())
