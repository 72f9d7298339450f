"""Turns of actors in processes of their own: decode waits for a quantum of a plan, and nobody long for one that is stopped."""

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from mmrt.actors.host import turns as module
from mmrt.actors.host.turns import FreeTurn, PlanTurn, StepTurn, open_turn
from mmrt.runtime.config.runtime_config import RuntimeConfig, parse_config
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.segment import Segment
from mmrt.shm.turns import Turns
from mmrt.tests.settings import examples
from mmrt.tests.shm.conftest import Child

LONG_S = 60.0
LAYER_S = 0.002
NUM_LAYERS = 10
CLOCK, STATE = 512, 520  # words of ``Log``: behind the header


@pytest.fixture(autouse=True)
def turns(run: RunDirectory) -> Turns:
    return Turns.create(run)


def config(turns: str = "layers", tbt_target_ms: float = 20.0) -> RuntimeConfig:
    return parse_config(f'[actors]\nturns = "{turns}"\n[scheduling]\ntbt_target_ms = {tbt_target_ms}\n')


def open_as(run: RunDirectory, actor: str, turns: str = "layers", beat: Callable[[int], None] = lambda _: None) -> FreeTurn:
    return open_turn(run, config(turns), actor, beat, lambda: None, lambda: None)


class Layers:
    """Computes plans in turn, and says with each layer how far it is: plans begun and layers done are words of a segment."""

    def __init__(self, run: RunDirectory, actor: str, turns: str = "layers") -> None:
        self.turn = open_as(run, actor, turns)
        self._words = Segment.attach(run.segment_path("log")).words

    def compute(self) -> None:
        while True:
            with self.turn:
                self._words[CLOCK] += 1
                for _ in range(NUM_LAYERS):
                    time.sleep(LAYER_S)
                    self._words[STATE] += 1
                    if self.turn.after_layer is not None:
                        self.turn.after_layer()


class Plans:
    """An actor in a process that computes plan after plan."""

    def __init__(self, run: RunDirectory, actor: str = "prefill", turns: str = "layers") -> None:
        self.log = Segment.create(run.segment_path("log"), 8192).words
        self._begin = lambda: Child(lambda: Layers(run, actor, turns).compute())
        self.child = self._begin()
        self.wait_for_layers(1)

    @property
    def num_layers(self) -> int:
        return int(self.log[STATE])

    def wait_for_layers(self, count: int) -> None:
        """Wait until so many more layers are computed."""
        goal, until_s = self.num_layers + count, time.monotonic() + LONG_S
        while self.num_layers < goal:
            assert time.monotonic() < until_s and self.child.poll() is None
            time.sleep(0.0005)

    def replace(self) -> None:
        """Begin another one in the place of one that is killed."""
        assert self.child.wait() == -signal.SIGKILL
        self.child = self._begin()


@pytest.fixture
def plans(run: RunDirectory) -> Iterator[Plans]:
    found = Plans(run)
    yield found
    found.child.kill()


def test_no_turns_at_all(run: RunDirectory) -> None:
    with open_as(run, "prefill", "off") as nothing, open_as(run, "decode", "off"):
        assert nothing is None
    assert open_as(run, "prefill", "off").after_layer is None


def test_decode_steps_between_layers(run: RunDirectory, plans: Plans, turns: Turns) -> None:
    """A quantum is shorter than a plan, which pauses in its middle, and then goes on from there."""
    decode, paused = open_as(run, "decode"), set()
    for _ in range(30):
        with decode:
            during = plans.num_layers
            paused.add(during % NUM_LAYERS)
            time.sleep(LAYER_S)
            assert plans.num_layers == during, "it computes while decode has its turn"
            decode.took(0.012)
    assert len(paused) > 1
    assert turns.step_s == 0.012


def test_a_step_waits_for_a_whole_plan_where_turns_are_of_plans(run: RunDirectory) -> None:
    plans = Plans(run, turns="plans")
    decode = open_as(run, "decode", "plans")
    try:
        for _ in range(5):
            with decode:
                assert plans.num_layers % NUM_LAYERS == 0
    finally:
        plans.child.kill()


def test_one_that_is_stopped_holds_up_nobody_for_long(
    run: RunDirectory, turns: Turns, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAST_PATIENCE_S", 0.2)
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    monkeypatch.setattr(module, "PLAN_PATIENCE_S", 0.2)
    beats: list[int] = []
    decode, encoder = open_as(run, "decode", beat=beats.append), open_as(run, "encoder")
    while True:  # stop it in its turn
        os.kill(plans.child.pid, signal.SIGSTOP)
        with decode:
            if not decode._turn.is_in:  # type: ignore[attr-defined]
                break
        os.kill(plans.child.pid, signal.SIGCONT)
        plans.wait_for_layers(1)
    assert sum(beats) == decode.waited_ns >= 0.2e9
    before = plans.num_layers
    waited_ns = decode.waited_ns
    for _ in range(20):
        with decode:
            decode.took(0.5)
    assert decode.waited_ns - waited_ns < 20 * 0.2e9, "it has lost patience, and waits for 20 ms"
    with encoder:
        assert encoder.after_layer is not None
        encoder.after_layer()
    assert plans.num_layers == before and turns.step_s == 0.0, "steps beside others tell nothing"
    os.kill(plans.child.pid, signal.SIGCONT)
    until_s = time.monotonic() + LONG_S
    while True:
        with decode:
            if decode._turn.is_in:  # type: ignore[attr-defined]
                break
        assert time.monotonic() < until_s
        time.sleep(0.001)


class Told(Exception):
    """The actor is to end."""


@pytest.mark.parametrize("kind", ["layers", "plans"])
@pytest.mark.parametrize("actor", ["decode", "encoder"])
def test_one_that_is_told_to_end_waits_no_longer(run: RunDirectory, actor: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that has the turn is stopped. Whoever gives up leaves no place taken."""
    monkeypatch.setattr(module, "LEAST_PATIENCE_S", LONG_S)
    monkeypatch.setattr(module, "PLAN_PATIENCE_S", LONG_S)
    others = Plans(run, turns=kind)

    def check() -> None:
        raise Told

    turn = open_turn(run, config(kind), actor, lambda _: None, check, lambda: None)
    try:
        for _ in range(100):
            os.kill(others.child.pid, signal.SIGSTOP)
            try:
                with turn:
                    pass  # it was stopped between its turns
            except Told:
                break
            os.kill(others.child.pid, signal.SIGCONT)
            others.wait_for_layers(1)
        else:
            pytest.fail("nothing ended the wait")
        os.kill(others.child.pid, signal.SIGCONT)
        later = open_as(run, "encoder", kind)
        with later:
            assert later.waited_ns < LONG_S * 1e9 / 2
    finally:
        others.child.kill()


def kill_in_a_plan(run: RunDirectory, kills: int, plans: Plans) -> list[float]:
    """Kill plans, somewhere in their layers. Returns the seconds until decode has its turn."""
    decode, took_s = open_as(run, "decode"), []
    for number in range(kills):
        plans.wait_for_layers(1 + number % 7)
        began_s = time.monotonic()
        os.kill(plans.child.pid, signal.SIGKILL)
        with decode:
            took_s.append(time.monotonic() - began_s)
            assert decode._turn.is_in  # type: ignore[attr-defined]
        plans.replace()
    return took_s


def kill_in_a_step(run: RunDirectory, kills: int, plans: Plans) -> list[float]:
    """Kill decode in its turn. Returns the seconds until the plan that waits for it has computed a layer."""

    def step() -> None:
        with open_as(run, "decode"):
            time.sleep(LONG_S)

    took_s = []
    for _ in range(kills):
        child, until_s = Child(step), time.monotonic() + LONG_S
        while not _is_still(plans):
            assert time.monotonic() < until_s
        began_s = time.monotonic()
        os.kill(child.pid, signal.SIGKILL)
        plans.wait_for_layers(1)
        took_s.append(time.monotonic() - began_s)
        assert child.wait() == -signal.SIGKILL
    return took_s


def _is_still(plans: Plans) -> bool:
    before = plans.num_layers
    time.sleep(5 * LAYER_S)
    return plans.num_layers == before


Kill = Callable[[RunDirectory, int, Plans], list[float]]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody goes on for want of patience."""
    monkeypatch.setattr(module, "LEAST_PATIENCE_S", LONG_S)
    monkeypatch.setattr(module, "PLAN_PATIENCE_S", LONG_S)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("kill", [kill_in_a_plan, kill_in_a_step])
def test_killed_in_its_turn_the_other_goes_on(run: RunDirectory, plans: Plans, kill: Kill) -> None:
    assert len(kill(run, examples(15), plans)) == examples(15)


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("kill", [kill_in_a_plan, kill_in_a_step])
def test_killed_in_its_turn_hundreds_of_times(run: RunDirectory, plans: Plans, kill: Kill) -> None:
    took_s = sorted(kill(run, 250, plans))
    print(f"the other goes on after {1000 * took_s[125]:.1f} ms (median), {1000 * took_s[-1]:.1f} ms (worst)")


def test_kinds_of_turns(run: RunDirectory) -> None:
    assert isinstance(open_as(run, "decode.1"), StepTurn)
    for actor in ("encoder", "prefill.3"):
        turn = open_as(run, actor, "plans")
        assert isinstance(turn, PlanTurn) and turn.after_layer is None
