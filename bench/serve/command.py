"""``mmrt bench serve``: drive any OpenAI-compatible server with a seeded workload; tables, JSON and a picture of what came of it.

Wires the parts together: ``workload`` plans, ``drivers`` and ``stall`` time, ``client`` sends, ``report`` computes. One process,
one event loop. All bodies are made before the clock runs, so that the client needs little processor while it measures.
"""

import asyncio
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import aiohttp
import msgspec
import uvloop
from rich.console import Console
from rich.progress import Progress

from ..environment import read_environment
from ..output import open_console, write_json
from ..render import show_report
from .client import BenchError, find_model, open_session, stream_chat
from .drivers import Notice, new_record, run_closed_loop, run_open_loop
from .options import Options, parse_options, settings_of
from .plot import PlotError, plot_run, require_matplotlib
from .record import Record
from .report import Report, count_failures, distribution, duration_of, summarise_groups, summarise_slo, summarise_stall
from .stall import STREAM_GROUP, StallPlan, StallRun, run_stall
from .traces import load_trace, scale_to_rate
from .workload import (
    Calibration,
    RequestPlan,
    calibrate,
    make_body,
    plan_mixed,
    plan_steady,
    poisson_arrivals,
    with_arrivals,
    with_trace,
)

_CALIBRATION_TOKENS = (32, 160)
_STALL_POOL = 256  # distinct texts for streams; a stream that is started again takes the next one


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 1 when a request failed or nothing could be measured."""
    options = parse_options(sys.argv[1:] if argv is None else argv)
    console = open_console(options.json)
    try:
        if options.plot:
            require_matplotlib()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report, records, stall = runner.run(run_bench(options, console))
        show_report(console, report)
        write_results(options, report, records, stall)
    except (BenchError, PlotError, OSError, ValueError) as error:
        print(f"mmrt bench serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mmrt bench serve: interrupted", file=sys.stderr)
        return 130
    return 1 if report.failures else 0


async def run_bench(options: Options, console: Console) -> tuple[Report, list[Record], StallRun | None]:
    """Plan, warm up, measure, and compute. Raises: BenchError, OSError, ValueError."""
    plans = plan_requests(options)
    environment = read_environment()
    async with open_session(options.timeout_s, options.api_key) as session:
        model = options.model or await find_model(session, options.url)
        target = _Target(session, options, model)
        await target.calibrate()
        await target.warm_up(_warmup_plans(options, plans))
        stall: StallRun | None = None
        if options.scenario == "stall":
            stall = await _measure_stall(target, plans, console)
            records = stall.records
        else:
            records = await _measure(target, plans, console)
    report = Report(
        scenario=options.scenario,
        model=model,
        settings=settings_of(options),
        environment=environment,
        duration_s=duration_of(records),
        groups=summarise_groups(records),
        failures=count_failures(records),
        lag=distribution(record.lag_s for record in records if record.sent_s),
        stall=summarise_stall(stall) if stall else None,
        slo=summarise_slo(records, options.slo) if options.slo else None,
    )
    return report, records, stall


def plan_requests(options: Options) -> list[RequestPlan]:
    """The requests of the run; for ``stall`` the fresh ones. Raises: OSError, ValueError for a trace that cannot be used."""
    if options.scenario == "stall":
        count = options.num_requests or max(1, int(options.phase_s / options.fresh_interval_s))
        lengths = msgspec.structs.replace(options.lengths, max_tokens=options.fresh_max_tokens)
        return plan_steady(options.modalities, count, lengths, options.seed)
    rows = load_trace(options.trace)[: options.num_requests] if options.trace else None
    count = len(rows) if rows is not None else options.num_requests or 0
    plan = plan_mixed if options.scenario == "mixed" else plan_steady
    plans = plan(options.modalities, count, options.lengths, options.seed)
    if rows is not None:
        rows = scale_to_rate(rows, options.rate) if options.rate is not None else rows
        return with_trace(plans, rows, own_input=options.own_input, own_output=options.own_output)
    if options.rate is not None:
        return with_arrivals(plans, poisson_arrivals(options.rate, count, options.seed))
    return plans


class _Target:
    """The server, and the bodies that were made for it."""

    def __init__(self, session: aiohttp.ClientSession, options: Options, model: str) -> None:
        self.options = options
        self._session = session
        self._model = model
        self._calibration = Calibration()
        self._bodies: dict[str, bytes] = {}

    def prepare(self, plans: Sequence[RequestPlan]) -> None:
        """Make the bodies of these requests."""
        for plan in plans:
            self._bodies[plan.seed] = self._body(plan)

    def _body(self, plan: RequestPlan) -> bytes:
        options = self.options
        return make_body(
            plan, options.shapes, self._calibration, self._model, extensions=options.extensions, temperature=options.temperature
        )

    async def send(self, plan: RequestPlan, record: Record) -> None:
        """Send a prepared request."""
        await stream_chat(self._session, self.options.url, self._bodies[plan.seed], record)

    async def probe(self, plan: RequestPlan) -> Record:
        """Send one request outside the measurement. Raises: BenchError if it fails."""
        record = new_record(plan, 0.0)
        await stream_chat(self._session, self.options.url, self._body(plan), record)
        if record.error is not None:
            raise BenchError(f"a {plan.group} request before the measurement failed: {record.error}")
        return record

    async def calibrate(self) -> None:
        """Learn how many tokens a word has, if the server says how many tokens a prompt had; else a word counts as one."""
        measured = []
        for words in _CALIBRATION_TOKENS:
            plan = RequestPlan(
                index=0, seed=f"calibration/{words}", group="calibration", media=(), num_input_tokens=words, max_tokens=1
            )
            measured.append((words, (await self.probe(plan)).num_prompt_tokens))
        (short, short_tokens), (long, long_tokens) = measured
        if short_tokens and long_tokens:
            self._calibration = calibrate((short, short_tokens), (long, long_tokens))

    async def warm_up(self, plans: Sequence[RequestPlan]) -> None:
        """One after the other. Raises: BenchError if one fails."""
        for plan in plans:
            await self.probe(plan)


def _warmup_plans(options: Options, plans: Sequence[RequestPlan]) -> list[RequestPlan]:
    """``num_warmup`` of each group, with content of their own and short answers."""
    first = {plan.group: plan for plan in reversed(plans)}
    return [
        msgspec.structs.replace(plan, seed=f"warmup/{plan.seed}/{number}", max_tokens=min(4, plan.max_tokens))
        for plan in first.values()
        for number in range(options.num_warmup)
    ]


async def _measure(target: _Target, plans: Sequence[RequestPlan], console: Console) -> list[Record]:
    target.prepare(plans)
    with _progress(console, len(plans)) as notice, _quiet_collector():
        if target.options.rate is None and target.options.trace is None:
            return await run_closed_loop(plans, target.options.concurrency, target.send, notice)
        return await run_open_loop(plans, target.send, notice)


async def _measure_stall(target: _Target, fresh: Sequence[RequestPlan], console: Console) -> StallRun:
    options = target.options
    texts = [
        msgspec.structs.replace(plan, group=STREAM_GROUP, index=len(fresh) + plan.index)
        for plan in plan_steady({"text": 1.0}, _STALL_POOL, options.lengths, options.seed)
    ]
    target.prepare([*fresh, *texts])
    plan = StallPlan(num_streams=options.num_streams, phase_s=options.phase_s, interval_s=options.fresh_interval_s, fresh=tuple(fresh))
    with _progress(console, len(fresh)) as notice, _quiet_collector():

        def notice_fresh(record: Record) -> None:
            if record.group != STREAM_GROUP:
                notice(record)

        return await run_stall(plan, lambda number: texts[number % _STALL_POOL], target.send, notice_fresh)


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
