"""A run whose stages are measured. Used by ``bench profile`` and ``bench sim --validate --profile``.

It has no caches. Passes of the ``phases`` are driven against it, and its flight recorders tell what each stage did and when.
``measured`` makes a cost model of that. The client runs on the same machine, as it does in ``mmrt bench serve``.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import uvloop

from mmrt.bench.environment import read_environment
from mmrt.bench.output import Tell
from mmrt.bench.own_run import OwnRun
from mmrt.bench.processes import descendants
from mmrt.bench.serve.client import find_model, open_session
from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.options import parse_options
from mmrt.bench.serve.target import Target
from mmrt.models.config import load_model_config
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import ServerSection
from mmrt.runtime.observe.dumps import Recording
from mmrt.runtime.observe.flight import FlightRecord, complete_since_ns, merge
from mmrt.runtime.process.processors import read_processors
from mmrt.runtime.process.run import read_run_info
from mmrt.shm.run_directory import RunDirectory

from .answers import measure_answers
from .costs import Answers, Costs
from .measured import Machine, fit
from .observation import Observation
from .phases import Phase, drive, make_phases

PASS_S = 60.0  # of all phases of a pass
_TIMEOUT_S = 600.0
_MOST_MORE = 0.5  # of the phases of a pass: at most so many disturbed phases are repeated


class Profiling:
    """Starts the run. Passes may be minutes apart: the speed of a machine differs from one to the next, and a rate compares phases.

    ``config``: of the run; it gets a free port, and no caches. Methods raise BenchError, OwnRunError, ShmError and OSError.
    """

    def __init__(self, run: OwnRun, config: RuntimeConfig, tell: Tell) -> None:
        self._environment = read_environment()
        memory = msgspec.structs.replace(config.memory, prefix_cache=False, embedding_cache=False)
        tell("starting a run to measure")
        run.up(msgspec.structs.replace(config, server=ServerSection(port=0), memory=memory))
        with RunDirectory.attach(run.run) as directory:
            info = read_run_info(directory)
        report = run.report()
        self._run, self._tell, self._actors = run.run, tell, info.config.actor
        self._model = load_model_config(info.model_path, info.config.model.dtype, weights=info.config.model.weights)
        self._url, shared = report.endpoint, Counter(actor.pid for actor in report.actors)
        self._own = {os.getpid(), *descendants(report.supervisor_pid or 0)}
        self._pids = {actor.pid: actor.name for actor in report.actors if actor.pid and shared[actor.pid] == 1}
        self._seen: list[Observation] = []
        self._answers: Answers | None = None

    def take_pass(self, seconds: float) -> None:
        """Drive all phases once, in so many seconds together. The first call also measures answers."""
        uvloop.run(self._take_pass(seconds))

    def costs(self, name: str) -> Costs:
        """The cost model of the passes. Raises: ValueError for too little of them."""
        sections = {stage: self._actors(stage) for stage in ("video", "encoder", "prefill", "decode")}
        threads = {stage: section.threads for stage, section in sections.items()}
        nice = {stage: section.nice for stage, section in sections.items()}
        machine = Machine(self._environment, read_processors().num_cores, threads, nice)
        return msgspec.structs.replace(fit(name, self._model, machine, self._seen), answers=self._answers or Answers())

    async def _take_pass(self, seconds: float) -> None:
        async with open_session(_TIMEOUT_S) as session:
            target = Target(session, parse_options(["--url", self._url]), self._url, await find_model(session, self._url))
            await target.calibrate()
            if self._answers is None:
                self._tell("answers")
                self._answers = await measure_answers(target, self._model.media_kinds)
            phases = make_phases(self._model.media_kinds, self._model.max_context, seconds)
            num_more = round(_MOST_MORE * len(phases))
            for at, phase in enumerate(phases):
                self._tell(f"{phase.name}: {at + 1} of {len(phases)}, {phase.seconds:.0f} s")

                async def take(phase: Phase = phase) -> Observation:
                    done = await drive(target, phase, self._pids, self._own)
                    records = await asyncio.to_thread(_recorded, self._run, done.begin_ns)
                    return Observation(done, [r for r in records if r.end_ns <= done.end_ns and r.time_ns >= done.begin_ns])

                one, num_taken = await undisturbed(take, num_more)
                num_more -= num_taken - 1
                self._seen.append(one)


async def undisturbed(take: Callable[[], Awaitable[Observation]], num_more: int) -> tuple[Observation, int]:
    """Take a phase, again while others disturb it, ``num_more`` times at most. Returns the least disturbed, and how many were taken."""
    taken = [await take()]
    while taken[-1].is_disturbed and len(taken) <= num_more:
        taken.append(await take())
    return min(taken, key=lambda one: one.run.others), len(taken)


def _recorded(run: Path, since_ns: int) -> list[FlightRecord]:
    """All records since then. Raises: BenchError if a recorder has lost some of them: what others did meanwhile would look as if it had
    been done alone."""
    with RunDirectory.attach(run) as directory:
        recorders = Recording.take(directory).recorders
    if (complete_ns := complete_since_ns(recorders)) > since_ns:
        raise BenchError(f"the flight recorders do not hold the first {(complete_ns - since_ns) / 1e9:.1f} s of a phase")
    return merge(recorders, since_ns)
