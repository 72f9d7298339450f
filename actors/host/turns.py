"""An actor's turns to compute, where encoder, prefill and decode compute one at a time (``actors.turns``), on all processors of their
device.

decode has a turn for each step, the others have one for each plan. By "layers" a plan that decode waits for pauses between two layers
for a step, so a time between tokens is a step and one ``Quantum`` at most.

A turn saves time and protects no data. So by "layers" nobody waits without end for one that is stopped or hangs: whoever loses patience
goes on without, and has little of it from then on until it gets a turn. By "plans" one waits until the supervisor ends the other.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from types import TracebackType

from ...runtime.config.runtime_config import RuntimeConfig
from ...runtime.controller.scheduling.budgets import objective_s, tbt_rule
from ...runtime.stage_table import InstanceId, stage_of
from ...shm.run_directory import RunDirectory
from ...shm.turns import Turns, Turnstile
from .free_turn import FreeTurn
from .quantum import Quantum, quantum_s

PATIENCE = 10.0  # TBT objectives that one waits for a step or a quantum. After that was too short, one, which is enough for both
LEAST_PATIENCE_S = 1.0
PLAN_PATIENCE_S = 10.0  # that a plan waits for another, which is whole while nobody decodes
NUM_STEPS = 9  # whose median is the time of a step

Beat = Callable[[int], None]
"""Takes the nanoseconds that the actor has waited since the last one."""


def open_turn(
    run: RunDirectory, config: RuntimeConfig, actor: str, beat: Beat, check: Callable[[], object], finish: Callable[[], object]
) -> FreeTurn:
    """Open an actor's turn. ``beat`` is called now and then while it waits, and ``check`` as well while it has not begun its plan or
    step: what it raises ends the wait. ``finish`` waits for all that it has launched.

    Raises: MissingError, SegmentError.
    """
    if config.actors.turns == "off":
        return FreeTurn()
    turns = Turns.attach(run, config.actor_devices.get(InstanceId(actor), 0))
    return StepTurn(turns, config, beat, check) if stage_of(actor) == "decode" else PlanTurn(turns, config, beat, check, finish)


class _Place:
    """One's place at a turnstile: in, or beside it."""

    def __init__(self, turnstile: Turnstile) -> None:
        self.turnstile = turnstile
        self.is_in = False
        self._has_patience = True

    def enter(self, patience_s: float, little_s: float, beat: Callable[[], None]) -> None:
        self.is_in = self.turnstile.enter(patience_s if self._has_patience else little_s, beat)
        self._has_patience = self.is_in

    def leave(self) -> None:
        if self.is_in:
            self.is_in = False
            self.turnstile.leave()


class _SharedTurn(FreeTurn):
    """A turn among those of the run."""

    def __init__(self, turns: Turns, config: RuntimeConfig, beat: Beat, check: Callable[[], object]) -> None:
        self._turns = turns
        self._rule = tbt_rule(config)
        self._is_whole = config.actors.turns == "plans"
        self._turn = _Place(turns.turn)
        self._beat, self._check = beat, check
        self._since_ns = 0

    def __enter__(self) -> None:
        self._take_turn(self._note_wait_to_begin)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._turn.leave()

    @property
    def _objective_s(self) -> float:
        return objective_s(self._rule, self._turns.step_s)

    def _take_turn(self, beat: Callable[[], None]) -> None:
        self._wait(self._turn, max(LEAST_PATIENCE_S, PATIENCE * self._objective_s), beat)

    def _wait(self, place: _Place, patience_s: float, beat: Callable[[], None]) -> None:
        self._since_ns = time.monotonic_ns()
        place.enter(math.inf if self._is_whole else patience_s, self._objective_s, beat)
        self._note_wait()

    def _note_wait_to_begin(self) -> None:
        self._note_wait()
        self._check()

    def _note_wait(self) -> None:
        since_ns, self._since_ns = self._since_ns, time.monotonic_ns()
        self.waited_ns += self._since_ns - since_ns
        self._beat(self._since_ns - since_ns)


class StepTurn(_SharedTurn):
    """decode's: it tells the others how long a step takes."""

    def __init__(self, turns: Turns, config: RuntimeConfig, beat: Beat, check: Callable[[], object]) -> None:
        super().__init__(turns, config, beat, check)
        self._steps_s: deque[float] = deque(maxlen=NUM_STEPS)

    def took(self, step_s: float) -> None:
        if self._turn.is_in:
            self._steps_s.append(step_s)
            self._turns.set_step_s(median(self._steps_s))


class PlanTurn(_SharedTurn):
    """encoder's or prefill's. One plan of both at a time asks for the turn."""

    def __init__(
        self, turns: Turns, config: RuntimeConfig, beat: Beat, check: Callable[[], object], finish: Callable[[], object]
    ) -> None:
        super().__init__(turns, config, beat, check)
        self._plans = _Place(turns.plans)
        self._finish = finish
        self._quantum = Quantum(0.0, 0.0)
        if not self._is_whole:
            self.after_layer = self._pause_when_over

    def __enter__(self) -> None:
        self._wait(self._plans, PLAN_PATIENCE_S, self._note_wait_to_begin)
        try:
            self._take_turn(self._note_wait_to_begin)
        except BaseException:
            self._plans.leave()
            raise
        self._quantum = Quantum(time.monotonic(), self._quantum_s())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._turn.leave()
        self._plans.leave()

    def _pause_when_over(self) -> None:
        if self._quantum.has_layers():
            return
        self._finish()
        if not self._quantum.is_over(time.monotonic()):
            return
        if not self._turn.is_in or self._turn.turnstile.is_wanted:
            self._turn.leave()
            self._take_turn(self._note_wait)
        self._quantum.begin(time.monotonic(), self._quantum_s())

    def _quantum_s(self) -> float:
        return quantum_s(self._objective_s, self._turns.step_s)
