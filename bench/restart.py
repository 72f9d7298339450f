"""``mmrt bench restart``: effects on clients of an actor's restart, kill, drain or code edit, under live streams.

Starts a run of its own. Every trial does one thing to one actor while several text streams flow, and takes the longest time that any
of them was silent; for the gateway, whose connections its death costs, the longest time that a new connection waits for its answer.
Each kill counts as a first one, however many went before. Called by ``mmrt bench``.
"""

import argparse
import asyncio
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from operator import sub
from pathlib import Path

import aiohttp
import msgspec
from rich.console import Console

from ..runtime.config.runtime_config import RuntimeConfig, to_toml
from ..runtime.config.sections import ModelSection, ServerSection, SupervisorSection
from ..runtime.errors import RunError
from ..runtime.stage_table import ACTORS, number_of, stage_of
from ..runtime.supervisor.control import LayoutReply, RestartReply, RestartRequest, ScaleRequest, call
from ..schema.gap_buckets import longest_s
from ..shm.run_directory import RunDirectory
from ..shm.sequence_table import SequenceTable
from ..shm.status import ActorState, ActorTable
from ..shm.step_gaps import StepGaps
from .environment import Environment, read_environment
from .output import JSON_HELP, run_bench
from .own_run import OwnRun, OwnRunError, own_run
from .render import show_table
from .serve.client import find_model, open_session
from .serve.errors import BenchError
from .serve.steady_streams import SteadyStreams, longest_silence

KINDS = ("restart", "kill")
TARGETS = {("restart", "decode"): 1.0, ("kill", "decode"): 1.5, ("kill", "controller"): 0.2, ("reload", "decode"): 1.5}
DRAIN_TARGET_S, SIBLING_TARGET_S = 0.05, 0.2
_VICTIM = "decode.1"
_PACKAGE = Path(__file__).parents[1]
_PACKAGE_PARTS = ("actors", "bench", "cli", "cpu_kernels", "media", "models", "runtime", "schema", "serving", "shm", "triton_kernels")
_POLL_S = 0.01
_TAIL_S = 0.3  # streams are watched for so long after the actor serves again
_QUIET_S = 1.0
_TIMEOUT_S = 60.0


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Trials of one kind on one actor, in seconds. ``measure``: what is timed."""

    kind: str
    actor: str
    measure: str
    values_s: list[float]
    target_s: float | None = None


class RestartBench(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    num_streams: int
    series: list[Series]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, also when a target is missed."""
    options = _parse(argv)
    bench = run_bench("restart", options.json, (OwnRunError, BenchError, RunError, OSError), lambda _: measure(options), show)
    return 1 if bench is None else 0


def measure(options: argparse.Namespace) -> RestartBench:
    """All series on one run. Raises: OwnRunError, BenchError, OSError."""
    environment = read_environment()
    with _package_copy(options.reloads > 0) as source, own_run() as run:
        _start(run, options.model, reload=source is not None)
        series = asyncio.run(_measure(run, options, source))
    return RestartBench(environment=environment, num_streams=options.streams, series=series)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mmrt bench restart", description="How long streams are silent when an actor is restarted or killed."
    )
    add = parser.add_argument
    add("--model", default="", metavar="DIR", help="default: the embedded demo model")
    add("--actors", nargs="+", choices=ACTORS, default=list(ACTORS), metavar="ACTOR", help="default: all of them")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help="restart and kill (-9); default: both")
    add("--count", type=_at_least(1), default=50, help="trials of each kind on each actor (%(default)s)")
    add("--reloads", type=_at_least(0), default=0, help="also edit decode's source so many times under mmrt up --reload (%(default)s)")
    add("--drains", type=_at_least(0), default=0, help="also drain, then kill, one of two decodes so many times (%(default)s)")
    add("--streams", type=_at_least(1), default=4, help="live text streams (%(default)s)")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    return parser.parse_args(argv)


def _at_least(limit: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < limit:
            raise argparse.ArgumentTypeError(f"{value} must be at least {limit}")
        return value

    parse.__name__ = "int"
    return parse


@contextmanager
def _package_copy(wanted: bool) -> Iterator[Path | None]:
    """A copy of the package that may be edited, imported by everything that is started meanwhile."""
    if not wanted:
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="mmrt-source-"))
    before = os.environ.get("PYTHONPATH")
    try:
        for part in _PACKAGE_PARTS:
            shutil.copytree(_PACKAGE / part, folder / "mmrt" / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(_PACKAGE / "__init__.py", folder / "mmrt")
        os.environ["PYTHONPATH"] = str(folder)
        yield folder / "mmrt"
    finally:
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before
        shutil.rmtree(folder, ignore_errors=True)


def _start(run: OwnRun, model: str, *, reload: bool) -> None:
    """Every death counts as a first one: of those before it nothing is remembered."""
    config = RuntimeConfig(
        model=ModelSection(path=str(Path(model).absolute()) if model else ""),
        server=ServerSection(port=0),
        supervisor=SupervisorSection(restart_limit=1 << 30, restart_window_s=0.001),
    )
    file = run.home / "config.toml"
    file.write_text(to_toml(config))
    run.command("up", "--detach", "--config", str(file), *(["--reload"] if reload else []))


async def _measure(run: OwnRun, options: argparse.Namespace, source: Path | None) -> list[Series]:
    with (
        RunDirectory.attach(run.run) as directory,
        closing(ActorTable.attach(directory, writable=False)) as table,
        closing(SequenceTable.attach(directory, writable=False)) as rows,
        closing(StepGaps.attach(directory)) as gaps,
    ):
        return await _all_series(run, table, rows, gaps, options, source)


async def _all_series(
    run: OwnRun, table: ActorTable, rows: SequenceTable, gaps: StepGaps, options: argparse.Namespace, source: Path | None
) -> list[Series]:
    url = run.report().endpoint
    async with open_session(3600.0) as session:
        streams = SteadyStreams(session, url, await find_model(session, url), options.streams)
        trials = _Trials(run.run, table, rows, gaps, session, url, streams)
        series = [await trials.undisturbed(options.count)]
        for actor in options.actors:
            for kind in options.kinds:
                print(f"{kind} {actor}", file=sys.stderr, flush=True)
                series.append(await trials.series(kind, actor, options.count))
        if source is not None:
            series.append(await trials.reloads(source, options.reloads))
        if options.drains:
            series += [await trials.drains(options.drains), *await trials.siblings(options.drains)]
        return series


class _Trials:
    """One run and the trials on it. An actor's status words show that it serves, at no cost to the run."""

    def __init__(
        self,
        run: Path,
        table: ActorTable,
        rows: SequenceTable,
        gaps: StepGaps,
        session: aiohttp.ClientSession,
        url: str,
        streams: SteadyStreams,
    ) -> None:
        self._run = run
        self._table = table
        self._rows = rows
        self._gaps = gaps
        self._session = session
        self._url = url
        self._streams = streams

    async def undisturbed(self, count: int) -> Series:
        """The longest silence when nothing is done, over windows of the same length as a short trial."""
        async with self._streams.running():
            values = [await self._silence(lambda: asyncio.sleep(_QUIET_S)) for _ in range(count)]
        return Series(kind="nothing", actor="", measure="silence", values_s=values)

    async def series(self, kind: str, actor: str, count: int) -> Series:
        act = self._restart if kind == "restart" else self._kill
        if stage_of(actor) == "gateway":
            values = [await self._answer_after(lambda: act(actor)) for _ in range(count)]
        else:
            async with self._streams.running():
                values = [await self._silence(lambda: act(actor)) for _ in range(count)]
        measure = "answer" if stage_of(actor) == "gateway" else "silence"
        return Series(kind=kind, actor=actor, measure=measure, values_s=values, target_s=TARGETS.get((kind, actor)))

    async def reloads(self, source: Path, count: int) -> Series:
        """From saving an edit to the end of the new process's first step."""
        values = []
        file = source / "actors" / "decode" / "loop.py"
        async with self._streams.running():
            for number in range(count):
                await self._streams.flow()
                old = self._table.read("decode").generation
                file.write_text(f"{file.read_text()}# edit {number}\n")
                start_s = time.monotonic()
                while (now := self._table.read("decode")).generation == old or not now.steps:
                    _expect_before(start_s + _TIMEOUT_S, "decode's new code has made no step")
                    await asyncio.sleep(_POLL_S / 5)
                values.append(time.monotonic() - start_s)
                await asyncio.sleep(_TAIL_S)
        return Series(kind="reload", actor="decode", measure="first step", values_s=values, target_s=TARGETS["reload", "decode"])

    async def drains(self, count: int) -> Series:
        """The longest silence while one of two decodes leaves and the other takes its rows over."""
        values = []
        for _ in range(count):
            await self._scale_decode(2)
            async with self._streams.running():
                values.append(await self._silence(lambda: self._scale_decode(1)))
        return Series(kind="drain", actor="decode of two", measure="silence", values_s=values, target_s=DRAIN_TARGET_S)

    async def siblings(self, count: int) -> list[Series]:
        """Kill one of two decodes: the longest silence of the other's streams, and between the commits of its tokens. What clients wait
        longer than that they wait for a processor: for the detokenizer's, the gateway's or their own."""
        await self._scale_decode(2)
        values: list[float] = []
        commits: list[float] = []
        async with self._streams.running():
            while len(values) < count:
                await self._streams.flow()
                start_s, num_lost = time.monotonic(), len(self._rows.rows_of(number_of(_VICTIM)))
                before = self._gaps.read_each()[0]
                await self._kill(_VICTIM)
                await asyncio.sleep(_TAIL_S)
                await self._streams.flow()
                silences = self._streams.silences(start_s, time.monotonic())
                if (silence := silence_of_others(silences, num_lost)) is not None:
                    values.append(silence)
                    commits.append(longest_s([*map(sub, self._gaps.read_each()[0], before)]))
        measured = {"silence": values, "in decode": commits}
        return [
            Series(kind="kill", actor="sibling of decode", measure=measure, values_s=values, target_s=SIBLING_TARGET_S)
            for measure, values in measured.items()
        ]

    async def _scale_decode(self, count: int) -> None:
        assert isinstance(await asyncio.to_thread(call, self._run, ScaleRequest("decode", count), None), LayoutReply)

    async def _silence(self, act: Callable[[], Awaitable[object]]) -> float:
        await self._streams.flow()
        start_s = time.monotonic()
        await act()
        await asyncio.sleep(_TAIL_S)
        await self._streams.flow()
        return longest_silence(self._streams.records, start_s, time.monotonic())

    async def _answer_after(self, act: Callable[[], Awaitable[object]]) -> float:
        """The longest time that a new connection waits for its answer, of those that are made one after another meanwhile."""
        task = asyncio.ensure_future(act())
        longest_s, start_s = 0.0, time.monotonic()
        while not task.done():
            try:
                async with self._session.get(f"{self._url}/health", headers={"Connection": "close"}) as response:
                    await response.read()
            except aiohttp.ClientConnectorError:
                raise  # refused: a process always listens
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                continue  # accepted by the gateway that died; time goes on for the next try
            longest_s = max(longest_s, time.monotonic() - start_s)
            await asyncio.sleep(_POLL_S)
            start_s = time.monotonic()
        await task
        return longest_s

    async def _restart(self, actor: str) -> None:
        reply = await asyncio.to_thread(call, self._run, RestartRequest(actor), None)
        assert isinstance(reply, RestartReply)
        if not reply.ok:
            raise BenchError(reply.message)

    async def _kill(self, actor: str) -> None:
        """Kill -9, and wait until another process serves."""
        before = self._table.read(actor).pid
        os.kill(before, signal.SIGKILL)
        start_s = time.monotonic()
        while (now := self._table.read(actor)).pid == before or now.state is not ActorState.ACTIVE:
            _expect_before(start_s + _TIMEOUT_S, f"{actor} has not come back")
            await asyncio.sleep(_POLL_S)


def silence_of_others(silences: Sequence[float], num_lost: int) -> float | None:
    """Return the longest silence of the streams that a killed actor did not serve, None if it served all. ``num_lost``: those that it
    served, which are silent for longer than any other."""
    others = sorted(silences)[: max(0, len(silences) - num_lost)]
    return others[-1] if others else None


def _expect_before(deadline_s: float, otherwise: str) -> None:
    if time.monotonic() > deadline_s:
        raise BenchError(f"{otherwise} within {_TIMEOUT_S:g} s")


def show(console: Console, bench: RestartBench) -> None:
    """One line for each series."""
    rows = []
    for series in bench.series:
        values = sorted(series.values_s)
        median_s, target_s = statistics.median(values), series.target_s
        verdict = "" if target_s is None else "reached" if median_s <= target_s else "MISSED"
        cells = [f"{median_s:.3f}", f"{values[-1]:.3f}", "" if target_s is None else f"<= {target_s:g}", verdict]
        rows.append([f"{series.kind} {series.actor}", series.measure, str(len(values)), *cells])
    title = f"seconds that a client waits, {bench.num_streams} streams"
    show_table(console, title, ["", "", "trials", "median", "worst", "target", ""], rows)
