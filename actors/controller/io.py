"""Shared memory that the controller writes, and its effects, performed in order."""

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ...runtime.bus.messages import ToActor
from ...runtime.controller.recovery import PlanSnapshot, RowSnapshot, RunSnapshot
from ...runtime.controller.rows.progress import IdSpan, Progress
from ...runtime.controller.state.effects import (
    AppendPages,
    AppendSourcePages,
    AppendSourceWindowPages,
    AppendWindowPages,
    BeginRow,
    ClearPages,
    ClearPlan,
    ClearSource,
    Effect,
    KeepEra,
    Send,
    SetOwner,
    SetPageGenerations,
    SetPageKeys,
    SetPhase,
    SetPrefilled,
    SetSourceStatePages,
    SetStatePages,
    WriteJournal,
    WritePlan,
    WriteSpec,
    WriteState,
)
from ...runtime.controller.state.records import JournalState
from ...runtime.controller.state.state_pages import StatePages
from ...runtime.pools import pools_of
from ...runtime.process.saved_pages import keep_era, read_era
from ...runtime.stage_table import InstanceId, instance_id, number_of
from ...schema.rows import Phase
from ...shm.doorbell import Ringer
from ...shm.page_secret import page_secret
from ...shm.plan_table import PlanTable
from ...shm.pool import PagePool
from ...shm.run_directory import RunDirectory
from ...shm.sequence_table import SequenceTable
from ...shm.step_gaps import StepGaps
from .journal import Journal

log = logging.getLogger(__name__)


class ControllerIO:
    """The shared memory that the controller writes. ``perform`` does memory effects, ``snapshot`` reads all of it back."""

    def __init__(
        self,
        run: RunDirectory,
        actors: Sequence[InstanceId],
        num_devices: int = 1,
        cache: Path | None = None,
        *,
        has_states: bool = False,
        has_windows: bool = False,
    ) -> None:
        """``actors``: those of the run, in the order of their numbers. More may come behind them. ``cache``: where the configuration
        has the files of saved pages. ``has_states``: its model has recurrent states. ``has_windows``: see ``pools_of``."""
        self.actors = actors
        self.table = SequenceTable.attach(run)
        self.plans = PlanTable.attach(run)
        self.gaps = StepGaps.attach(run)
        self.pools = {name: PagePool.attach(run, name, "grant") for name in pools_of(num_devices, has_states, has_windows)}
        self.secret = page_secret(run.path)
        self._bell = Ringer(run, "detokenizer")
        self._run, self._cache = run.path, cache

    def close(self) -> None:
        self.table.close()
        self.plans.close()
        self.gaps.close()
        self._bell.close()
        for pool in self.pools.values():
            pool.close()

    def progress(self, watched: Iterable[tuple[int, int]]) -> list[Progress]:
        """Read decode's words for these rows. The end is read before the count, which is then final."""
        table = self.table
        progress = []
        for row, generation in watched:
            end_code = int(table.end(row, generation))
            progress.append((row, generation, table.committed(row, generation), end_code))
        return progress

    def ids(self, spans: Iterable[IdSpan]) -> list[tuple[IdSpan, list[int]]]:
        """Read committed ids of rows."""
        return [(span, self.table.ids[span.row, span.first : span.last].tolist()) for span in spans]

    def perform(self, effect: Effect) -> None:
        """Perform one effect on memory."""
        table = self.table
        match effect:
            case SetPageGenerations(pool, run):
                self.pools[pool].generations[run.pages] = run.generations
            case SetPageKeys(pool, run, keys, depths):
                self.pools[pool].write_keys(run.pages, run.generations, keys, depths)
            case KeepEra(era):
                self._keep_era(era)
            case BeginRow(row, generation):
                begun = table.begin(row)
                assert begun == generation, f"row {row} is at generation {begun}, not {generation}"
            case WriteState(row, state):
                table.write_state(row, state)
            case WriteSpec(row, spec, prompts):
                for member, prompt in enumerate(prompts):
                    table.write_prompt(row, member, prompt)
                table.write_spec(row, spec)
            case AppendPages(row, member, pages):
                table.append_pages(row, member, pages)
            case AppendSourcePages(row, member, pages):
                table.append_source_pages(row, member, pages)
            case AppendWindowPages(row, member, pages):
                table.append_window_pages(row, member, pages)
            case AppendSourceWindowPages(row, member, pages):
                table.append_window_pages(row, member, pages, is_source=True)
            case ClearSource(row):
                table.clear_source(row)
            case ClearPages(row):
                table.clear_pages(row)
            case SetStatePages(row, member, states, log, snapshot):
                table.set_state_pages(row, member, states, log, snapshot)
            case SetSourceStatePages(row, member, states, log, snapshot):
                table.set_source_state_pages(row, member, states, log, snapshot)
            case SetPrefilled(row, member, num_tokens, slot):
                table.set_prefilled(row, member, num_tokens, slot)
            case SetPhase(row, phase):
                table.set_phase(row, phase)
                if phase == Phase.DECODE and table.committed(row, table.phase(row)[0]):
                    self._bell.ring()  # its text begins now
            case SetOwner(row, decode):
                table.set_owner(row, None if decode is None else number_of(decode))
            case WritePlan(slot, plan_id, actor, payload):
                self.plans.write(slot, plan_id, self.actors.index(actor), payload)
            case ClearPlan(slot):
                self.plans.clear(slot)
            case _:
                raise AssertionError(f"{type(effect).__name__} is no effect on memory")

    def snapshot(self, journal: JournalState, actors: dict[InstanceId, int]) -> RunSnapshot:
        """Return everything that the previous controller left."""
        table = self.table
        rows = []
        for row in range(table.num_rows):
            generation, phase = table.phase(row)
            if phase == Phase.FREE:
                continue
            tables = (table.pages(row, 0).tolist(), table.pages(row, 1).tolist())
            source = (table.source_pages(row, 0).tolist(), table.source_pages(row, 1).tolist())
            end_code, state = int(table.end(row, generation)), table.read_state(row)
            committed = table.committed(row, generation)
            ids = table.ids[row, :committed].tolist()
            number = table.owner(row, generation)
            owner = None if number is None else instance_id("decode", number)
            prefilled, slots = table.num_prefilled(row), table.state_slots(row)
            readers = table.state_pages, table.source_state_pages
            states = [(StatePages(*read(row, 0)), StatePages(*read(row, 1))) for read in readers]
            windows = [(read(row, 0).tolist(), read(row, 1).tolist()) for read in (table.window_pages, table.source_window_pages)]
            words = tables, prefilled, committed, end_code, state, ids, owner, source, *states, slots, *windows
            rows.append(RowSnapshot(row, generation, phase, *words))
        plans = [PlanSnapshot(plan.slot, plan.plan_id, self.actors[plan.actor], plan.payload) for plan in self.plans.live()]
        generations = {name: pool.generations.tolist() for name, pool in self.pools.items()}
        keys = {name: pool.read_keys() for name, pool in self.pools.items()}
        return RunSnapshot(journal, rows, table.generation.tolist(), plans, generations, actors, keys, self.secret, self._kept_era())

    def _kept_era(self) -> bytes:
        try:
            return b"" if self._cache is None else read_era(self._run, self._cache)
        except OSError as error:
            log.warning("cache.dir: the era of the caches cannot be read: %s", error)
            return b""

    def _keep_era(self, era: bytes) -> None:
        try:
            if self._cache is not None:
                keep_era(self._run, self._cache, era)
        except OSError as error:
            log.warning("cache.dir: later runs will find what was cleared: %s", error)


def perform_all(
    effects: Iterable[Effect],
    io: ControllerIO,
    journal: Journal,
    send: Callable[[InstanceId, int, ToActor], object],
    record: Callable[[Effect], object] = lambda _: None,
) -> None:
    """Perform effects in order: memory is written before a message refers to it. ``record`` is called after each effect."""
    for effect in effects:
        if isinstance(effect, Send):
            send(effect.actor, effect.generation, effect.message)
        elif isinstance(effect, WriteJournal):
            journal.append(effect.record)
        else:
            io.perform(effect)
        record(effect)
