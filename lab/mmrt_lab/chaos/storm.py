"""The storm: its own run under load, one fault after another, and all checks during and after them.

``command`` calls it once the file system is ready; one event loop runs faults, load and the polls of /health and /ready.
"""

import asyncio
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from operator import sub
from pathlib import Path

from mmrt.bench.own_run import OwnRun, OwnRunError
from mmrt.bench.processes import SUPERVISOR, descendants, is_gone
from mmrt.runtime.bus.faults import FaultFile
from mmrt.schema.gap_buckets import longest_s

from . import census
from .bystanders import Bystanders
from .faults import PHASES, Fault, fault_at, targets_of
from .faults import Phase as StormPhase
from .findings import Findings
from .inject import Injector, Limits, until
from .lines import LineOrders
from .load import Load
from .options import ChaosOptions
from .private_tmpfs import PrivateTmpfs
from .report import StormReport
from .requests import catalogue
from .run_view import RunView
from .storm_config import DRAIN_S, storm_config
from .truth import TruthTeller, ask

ENOSPC_SPARE_BYTES = 16 << 20  # for the recorders of other layouts, a MiB for each new actor, among others
_REQUEST_TIMEOUT_S = 240.0
_PHASE_S = 4.0  # to wait for a phase; after that the fault hits in any phase
_LOOK_S = 0.002
_SETTLE_S = 20.0
_ORPHANS_S = 30.0  # for processes without a supervisor to end


class StormEnd(Exception):
    """The storm cannot go on. The cause is recorded as a problem."""


class Storm:
    """One storm, from ``up`` to ``down``. ``say`` prints a line of progress."""

    def __init__(
        self,
        options: ChaosOptions,
        run: OwnRun,
        model: Path,
        fault_file: FaultFile,
        tmpfs: PrivateTmpfs | None,
        say: Callable[[str], None],
    ) -> None:
        self.report = StormReport(seed=options.seed, filters=options.filters)
        self._findings = Findings(self.report, say, options.is_exact)
        self._options = options
        self._run = run
        self._config = storm_config(model, options.layout, options.turns, options.has_default_restarts, options.dtype, options.weights)
        self._fault_file = fault_file
        self._tmpfs = tmpfs
        self._limits = Limits()
        self._is_up = False
        # One life of the run after another: made by ``_up``.
        self._url: str
        self._view: RunView
        self._injector: Injector
        self._watching: asyncio.Task[None]
        self._baseline: census.Count
        self._lines = LineOrders(fault_file.path, (*targets_of(options.layout), SUPERVISOR))
        self._bystanders: Bystanders
        self._counts: list[tuple[float, census.Count]] = []
        self._load = Load(
            [request for request in catalogue(options.max_tokens) if options.is_exact or request.has_fixed_length],
            options.seed,
            options.concurrency,
            options.cancel_share,
            _REQUEST_TIMEOUT_S,
            self._findings.on_outcome,
        )
        self._truth = TruthTeller(self._findings.mood, self._findings.note)

    def _note(self, problem: str) -> None:
        self._findings.note(problem)

    async def run(self) -> StormReport:
        """The whole storm, or what there was of it until a signal ended it.

        Raises: OwnRunError when the run does not even come up; ValueError when it answers nothing.
        """
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await self._up()
        try:
            self.report.references = await self._load.references()
            self._baseline = await self._first_count()
            self._load.start()
            try:
                await self._weather()
            except StormEnd:
                pass
            except asyncio.CancelledError:
                task.uncancel()
                self.report.notes.append("a signal has ended the storm early")
            finally:
                self._load.hold()
                await self._load.stop()
        finally:
            await self._down()
        report = self.report
        report.seconds = self._findings.seconds
        report.num_polls, report.num_unready = self._truth.num_polls, self._truth.num_unready
        report.counts = [count for _, count in self._counts]
        if self._options.is_soak:  # not its first third: until everybody has been forked once from a whole zygote processes differ
            for problem in census.slope_problems(self._counts[len(self._counts) // 3 :]):
                self._note(problem)
        return report

    async def _weather(self) -> None:
        options = self._options
        if options.replay is None or not options.replay[1]:
            if options.storm_cells:
                await self._storm()
        if options.drain_cells or options.replay is not None:
            for index in range(options.num_drains):
                if index:
                    await self._up()
                number = options.replay[2] if options.replay else index
                await self._drain(fault_at(options.seed, number, options.drain_cells, layout=options.layout))

    async def _storm(self) -> None:
        options = self._options
        self._load.resume()
        end_s = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
        index = 0
        while (options.num_faults is None or index < options.num_faults) and time.monotonic() < end_s:
            began_s = time.monotonic()
            number = options.replay[2] if options.replay else index
            await self._fault(fault_at(options.seed, number, options.storm_cells, options.pairs, options.layout))
            index += 1
            if index % options.quiet_every == 0:
                await self._quiet_point()
            await asyncio.sleep(max(0.0, min(end_s, began_s + options.interval_s) - time.monotonic()))
        await self._quiet_point()

    # ------------------------------------------------------------------------------------------------------- faults

    async def _fault(self, fault: Fault) -> None:
        cell = fault.cell
        if cell.kind == "enospc" and self._tmpfs is None:
            return
        if cell.phase == "idle":
            await self._load.pause()
            await until(lambda: census.is_settled(self._view), _SETTLE_S)
        gaps = self._view.gaps()
        seen = await self._await_phase(cell.phase, fault.delay_s)
        self._findings.begin(fault)
        pids = descendants(self._view.supervisor_pid)
        self._note(await self._injector.strike(fault))
        if cell.target == SUPERVISOR:
            await self._live_again(pids)
            self._findings.end(seen, lines=self._injector.died_at)
            return
        self._note(await self._injector.all_serve())
        self._findings.end(seen, self._longest_gap_s(fault, gaps), self._injector.died_at)
        if is_gone(self._view.supervisor_pid):
            self._note("the supervisor is gone: the run has ended")
            raise StormEnd
        self._check_bystanders(fault)
        if cell.phase == "idle":
            self._load.resume()

    async def _live_again(self, pids: Mapping[int, str]) -> None:
        """See the run end without its supervisor, with all its processes, and start another."""
        self._load.hold()
        await until(lambda: all(map(is_gone, pids)) and not self._run.run.exists(), _ORPHANS_S)
        self._check_nothing_is_left(pids)
        await self._load.pause()
        await self._load.disconnect()
        self._check_watching()
        self._watching.cancel()
        self._view.close()
        await self._up()
        if await self._load.references() != self.report.references:
            self._note("the next run does not answer as the first one did")
        self._baseline = await self._first_count()
        self._load.resume()

    async def _await_phase(self, phase: StormPhase, delay_s: float) -> StormPhase:
        """Wait until the run is in this phase. Returns what it is in at the end."""
        await until(lambda: phase in self._view.phases(), _PHASE_S)
        if delay_s:
            await asyncio.sleep(delay_s)
        found = self._view.phases()
        if phase in found or not found:
            return phase
        return max(found, key=PHASES.index)

    def _check_bystanders(self, fault: Fault | None = None) -> None:
        """Check that since the last check only those were replaced that this fault has hit."""
        for problem in self._bystanders.check(self._view.generations(), fault):
            self._note(problem)

    def _longest_gap_s(self, fault: Fault, before: Mapping[str, Sequence[int]]) -> float:
        """The longest time between tokens since then, of decodes in processes that the fault did not hit."""
        hit, gaps = self._together({fault.cell.target, fault.second}), self._view.gaps()
        bystanders = [name for name in before if name not in hit and name in gaps]
        return max((longest_s([*map(sub, gaps[name], before[name])]) for name in bystanders), default=0.0)

    def _together(self, names: set[str]) -> set[str]:
        """These actors, and those that share processes with them."""
        return {name for actors in self._config.processes.values() if names & {*actors} for name in actors}

    async def _drain(self, fault: Fault) -> None:
        """Take the run down in mid-stream, with a fault once it drains."""
        self._load.resume()
        await until(lambda: self._view.stats().running >= 2, _SETTLE_S)
        pids = descendants(self._view.supervisor_pid)
        self._findings.begin(fault)
        self._findings.is_draining = True
        down = asyncio.create_task(asyncio.to_thread(self._run.command, "down", "--drain", str(DRAIN_S)))
        await self._await_unready()
        self._load.hold()
        problem = await self._injector.strike(fault)
        try:
            await down
        except OwnRunError as error:
            self._note(f"down failed: {error}")
        self._note(problem)
        await self._load.pause()
        await self._load.disconnect()
        self._check_watching()
        self._watching.cancel()
        self._findings.end("drain")
        self._check_nothing_is_left(pids)
        self._view.close()
        self._is_up = self._findings.is_draining = False

    def _check_nothing_is_left(self, pids: Mapping[int, str]) -> None:
        """Check that after the run's end these processes and the run directory are gone."""
        if left := {name for pid, name in pids.items() if not is_gone(pid)}:
            self._note(f"after its end there still is {', '.join(sorted(left))}")
        if self._run.run.exists():
            self._note(f"after its end there still is {self._run.run}")

    async def _await_unready(self) -> None:
        """Wait until /ready shows that the drain has begun."""
        end_s = time.monotonic() + 10
        while time.monotonic() < end_s:
            try:
                if await ask(self._url, "/ready") == 503:
                    return
            except (OSError, ValueError):
                return
            await asyncio.sleep(0.01)
        self._note("/ready did not say 503 within 10 s of mmrt down")

    # ------------------------------------------------------------------------------------------------- quiet points

    async def _first_count(self) -> census.Count:
        """The undisturbed run, after it has answered everything once."""
        await until(lambda: census.is_settled(self._view), _SETTLE_S)
        await self._reconnect()
        return await census.first_count(self._view, _SETTLE_S)

    async def _quiet_point(self) -> None:
        self._check_watching()
        await self._load.pause()
        await self._reconnect()
        await until(lambda: census.is_settled(self._view), _SETTLE_S)
        self._check_bystanders()
        problems: list[str] = []

        def is_back() -> bool:
            problems[:] = census.compare(census.count(self._view), self._baseline)
            return not problems

        await until(is_back, 3.0)
        for problem in problems:
            self._note(f"at a quiet point {problem}")
        if self._options.is_soak:
            self._counts.append((time.monotonic(), census.count(self._view, with_memory=True)))
        self.report.num_quiet_points += 1
        self._load.resume()

    def _check_watching(self) -> None:
        """Raise any exception that has ended the polls: a bug of the storm itself."""
        if self._watching.done():
            self._watching.result()

    async def _reconnect(self) -> None:
        """Connections that are kept alive would count as descriptors."""
        await self._load.disconnect()
        self._load.connect(self._url, Path(self._config.model.path).name)

    # ------------------------------------------------------------------------------------------------- up and down

    async def _up(self) -> None:
        await asyncio.to_thread(self._run.up, self._config)
        self._is_up = True
        report = await asyncio.to_thread(self._run.report)
        assert report.supervisor_pid is not None
        self._url = report.endpoint
        self._view = RunView(self._run.run, report.supervisor_pid)
        self._bystanders = Bystanders(self._together, self._view.generations())
        if self._tmpfs is not None:
            self._tmpfs.limit(ENOSPC_SPARE_BYTES)
        layout = self._options.layout
        self._injector = Injector(self._view, self._fault_file, self._tmpfs, self._limits, DRAIN_S, self._command, layout, self._lines)
        self._load.connect(self._url, Path(self._config.model.path).name)
        self._watching = asyncio.create_task(self._truth.watch(self._url, self._view))

    async def _command(self, *arguments: str) -> str:
        """As a user does it. Returns what went wrong."""
        try:
            await asyncio.to_thread(self._run.command, *arguments)
        except OwnRunError as error:
            return str(error)
        return ""

    async def _down(self) -> None:
        """An orderly end, if there was none yet."""
        if not self._is_up:
            return
        self._findings.is_draining = True
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        self._view.close()
        pids = descendants(self._view.supervisor_pid)
        try:
            await asyncio.to_thread(self._run.down)
        except OwnRunError as error:
            self._note(f"down failed: {error}")
        self._check_nothing_is_left(pids)
