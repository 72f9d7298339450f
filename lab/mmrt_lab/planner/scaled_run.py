"""A simulated run whose processes of encoder, prefill and decode come and go: the controller's own draining, and a scaler's proposals
followed at once (MS4). Only a simulation follows them."""

from collections.abc import Sequence
from itertools import count

import msgspec

from mmrt.runtime.autoscale.scaler import Meter, Proposal, Sample, Scaler, kinds_of, letters_of
from mmrt.runtime.controller.rows.instances import drained
from mmrt.runtime.stage_table import STAGES, InstanceId, instance_id, stage_of

from ..sim.events import NS, to_ns
from ..sim.simulation import Simulation


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Processes of a kind from ``at_s`` on, counted from the first look."""

    at_s: float
    kind: str
    num: int
    why: str


class Process(msgspec.Struct, kw_only=True):
    """``stopped_ns`` 0: it is there."""

    actors: tuple[InstanceId, ...]
    began_ns: int
    stopped_ns: int = 0
    serves: bool = False
    leaves: bool = False


class ScaledRun:
    """Watches a simulation and follows a scaler. ``start_s``: from the decision to have a process until it serves; a process costs from
    the decision on, until it is drained. Without a scaler nothing changes."""

    def __init__(
        self, simulation: Simulation, processes: Sequence[tuple[InstanceId, ...]], scaler: Scaler | None, look_s: float, start_s: float
    ) -> None:
        """``processes``: the actors of each process at the start."""
        self.changes: list[Change] = []
        self._simulation, self._scaler = simulation, scaler
        self._look_ns, self._start_ns = to_ns(look_s), to_ns(start_s)
        now_ns = self._began_ns = simulation.queue.now_ns
        self._processes = [Process(actors=actors, began_ns=now_ns, serves=True) for actors in processes]
        self._meter = Meter(self._sample())
        simulation.queue.after(self._look_ns, self._look)

    def process_s(self, end_ns: int) -> float:
        """Seconds of all processes together up to then."""
        return sum((min(process.stopped_ns or end_ns, end_ns) - process.began_ns) / NS for process in self._processes)

    def _look(self) -> None:
        self._stop_drained()
        kinds = {kind: list(there) for kind, there in kinds_of({p.actors[-1]: p.actors for p in self._there()}).items()}
        figures = self._meter.look(self._sample(), kinds)
        starting = {letters_of(process.actors) for process in self._there() if not process.serves}
        for proposal in self._scaler.propose(self._simulation.queue.now_s, figures) if self._scaler else ():
            if proposal.kind not in starting:  # what is about to come may do, and none leaves before it serves
                self._follow(proposal)
        self._simulation.queue.after(self._look_ns, self._look)

    def _there(self) -> list[Process]:
        """Processes that are not about to go, with those about to come."""
        return [process for process in self._processes if not process.leaves and not process.stopped_ns]

    def _sample(self) -> Sample:
        simulation, state = self._simulation, self._simulation.controller.state
        workers = {name: worker for name, worker in simulation.workers.items() if STAGES[stage_of(name)].has_device}
        return Sample(
            at_s=simulation.queue.now_s,
            busy_s={name: worker.busy_ns / NS for name, worker in workers.items()},
            units={name: worker.num_units for name, worker in workers.items()},
            rows_left=sum(request.rows_left for request in state.requests.values()),
            tokens_left=sum(request.tokens_left for request in state.requests.values()),
            tbt_p99_s=state.facts.tbt_p99_s,
            tbt_objective_s=state.facts.tbt_s,
        )

    def _follow(self, proposal: Proposal) -> None:
        now_ns = self._simulation.queue.now_ns
        self.changes.append(Change(at_s=(now_ns - self._began_ns) / NS, kind=proposal.kind, num=proposal.wanted, why=proposal.why))
        there = [process for process in self._there() if letters_of(process.actors) == proposal.kind]
        for _ in range(proposal.num, proposal.wanted):
            process = Process(actors=self._free_names(proposal.kind), began_ns=now_ns)
            self._processes.append(process)
            self._simulation.queue.after(self._start_ns, self._serve, process)
        for process in there[proposal.wanted :]:
            process.leaves = True
        self._tell()

    def _serve(self, process: Process) -> None:
        """The process has loaded its weights."""
        process.serves = True
        self._simulation.start(dict.fromkeys(process.actors, process.actors[-1]))
        self._tell()

    def _tell(self) -> None:
        """Tell the controller who is there and who leaves."""
        controller = self._simulation.controller
        fixed = [actor for actor in controller.state.limits.actors if not STAGES[stage_of(actor)].has_device]
        present = [process for process in self._processes if process.serves and not process.stopped_ns]
        actors = [*fixed, *(actor for process in present for actor in process.actors)]
        controller.set_instances(actors, [actor for process in present if process.leaves for actor in process.actors])

    def _stop_drained(self) -> None:
        idle = {*drained(self._simulation.controller.state)}
        for process in self._processes:
            if process.leaves and not process.stopped_ns and idle.issuperset(process.actors):
                process.stopped_ns = self._simulation.queue.now_ns
                self._simulation.stop(process.actors)
                self._tell()

    def _free_names(self, kind: str) -> tuple[InstanceId, ...]:
        """Names for a new process, of the lowest numbers that no process has."""
        taken = {actor for process in self._processes if not process.stopped_ns for actor in process.actors}
        names = []
        for name, stage in STAGES.items():
            if stage.letter and stage.letter in kind:
                names.append(next(actor for n in count() if (actor := instance_id(name, n)) not in taken))
        return tuple(names)
