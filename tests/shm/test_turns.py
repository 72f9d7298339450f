"""The turn to compute: one at a time, each in its order, and free at once when its holder dies, wherever that is."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.shm import robust_mutex
from mmrt.shm.errors import MissingError, SegmentError
from mmrt.shm.robust_mutex import RobustMutex
from mmrt.shm.segment import HEADER_BYTES, Segment
from mmrt.shm.turns import Turns, Turnstile
from mmrt.tests.settings import examples

LONG_S = 60.0  # of waiting for what is to come at once


# ------------------------------------------------------------------------------------------------------------- a model


class Killed(BaseException):
    """Ends a process of the world."""


class World:
    """Processes that run one at a time, each up to its next use of a mutex or the end of its computing, in an order that ``choose``
    makes. Using a mutex takes no time beside computing: somebody stops to compute only when nobody else can go on."""

    def __init__(self, choose: Callable[[int], int]) -> None:
        self.choose = choose
        self.processes: list[Process] = []
        self.is_over = False

    def run(self, num_moves: int) -> None:
        """Let processes go on, ``num_moves`` times, or kill one; a killed one has a successor."""
        for _ in range(num_moves):
            ready = [process for process in self.processes if process.can_go_on()]
            assert ready, f"all wait: {[process.name for process in self.processes]}"
            quick = [process for process in ready if not process.computes]
            if self.choose(12) == 0:
                victim = self.processes[self.choose(len(self.processes))]
                victim.kill()
                self.processes[self.processes.index(victim)] = victim.successor()
            else:
                among = quick or ready
                among[self.choose(len(among))].go_on()
        for process in self.processes:
            process.kill()


class Process:
    """One of a world's, in a thread."""

    def __init__(self, world: World, name: str, body: Callable[["Process"], None]) -> None:
        self.name, self.computes, self.is_dead = name, False, False
        self.held: list[ModelMutex] = []
        self._error: BaseException | None = None
        self._world, self._body = world, body
        self._may_go, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.can_go_on: Callable[[], bool] = lambda: True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._has_stopped.acquire()

    def _run(self) -> None:
        try:
            self.stop(lambda: True)
            self._body(self)
        except Killed:
            pass
        except BaseException as error:
            self._error = error
        self._has_stopped.release()

    def stop(self, until: Callable[[], bool]) -> None:
        """Let the others go on until a condition holds and the world has chosen this process."""
        if self.is_dead:
            raise Killed
        self.can_go_on = until
        self._has_stopped.release()
        self._may_go.acquire()
        if self.is_dead:
            raise Killed

    def compute(self) -> None:
        self.computes = True
        self.stop(lambda: True)
        self.computes = False

    def go_on(self) -> None:
        self._may_go.release()
        self._has_stopped.acquire()
        if self._error is not None:
            raise self._error

    def kill(self) -> None:
        """Let it run no more: the kernel frees what it holds."""
        self.is_dead = True
        for mutex in self.held:
            mutex.holder = None
        self.go_on()
        self._thread.join()

    def successor(self) -> "Process":
        return Process(self._world, self.name, self._body)


class ModelMutex:
    """A robust mutex of a world. Its waiters are in no order."""

    def __init__(self) -> None:
        self.holder: Process | None = None

    def of(self, process: Process) -> "ModelHandle":
        return ModelHandle(self, process)


class ModelHandle:
    def __init__(self, mutex: ModelMutex, process: Process) -> None:
        self._mutex, self._process = mutex, process

    def try_acquire(self) -> bool:
        self._process.stop(lambda: True)
        return self._take()

    def acquire(self, timeout_s: float) -> bool:
        self._process.stop(lambda: self._mutex.holder is None or timeout_s == 0.0)
        return self._take()

    def _take(self) -> bool:
        if self._mutex.holder is not None:
            return False
        self._mutex.holder = self._process
        self._process.held.append(self._mutex)
        return True

    def release(self) -> None:
        self._process.stop(lambda: True)
        assert self._mutex.holder is self._process
        self._mutex.holder = None
        self._process.held.remove(self._mutex)


class Watch:
    """The order of things: who has the turn, and who has waited how long for it."""

    def __init__(self) -> None:
        self.inside: Process | None = None
        self.passed: dict[str, int] = {}  # whole turns of others since one began to wait

    @contextmanager
    def turn(self, process: Process, turnstile: Turnstile) -> Iterator[None]:
        self.passed[process.name] = 0
        assert turnstile.enter()
        assert self.inside is None or self.inside.is_dead, f"{process.name} and {self.inside.name}"
        self.inside = process
        assert self.passed.pop(process.name) <= 1, f"{process.name} has waited too long"
        yield
        assert self.inside is process
        self.inside = None
        for name in self.passed:
            self.passed[name] += 1
        turnstile.leave()


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 1 << 32), with_prefill=st.booleans())
def test_whoever_is_killed_one_computes_at_a_time_and_decode_waits_for_one_quantum(seed: int, with_prefill: bool) -> None:
    world = World(random.Random(seed).randrange)
    mutexes = [ModelMutex() for _ in range(4)]
    watch, done = Watch(), {"decode": 0, "encoder": 0, "prefill": 0}

    def turnstiles(process: Process) -> tuple[Turnstile, Turnstile]:
        current, following, plan, next_plan = (mutex.of(process) for mutex in mutexes)
        return Turnstile(current, following), Turnstile(plan, next_plan)

    def decode(process: Process) -> None:
        turn, _ = turnstiles(process)
        while True:
            with watch.turn(process, turn):
                process.compute()
                done["decode"] += 1

    def work(process: Process) -> None:
        turn, plans = turnstiles(process)
        while True:
            assert plans.enter()
            for _ in range(2):
                with watch.turn(process, turn):
                    process.compute()
                    done[process.name] += 1
            plans.leave()

    for name in ("decode", "encoder", "prefill")[: 2 + with_prefill]:
        world.processes.append(Process(world, name, decode if name == "decode" else work))
    world.run(150)
    assert done["decode"] > 0


# ------------------------------------------------------------------------------------------------------ real processes


def test_one_waits_until_the_other_leaves(run, crashes):
    turns = Turns.create(run)
    assert turns.turn.enter() and not turns.turn.is_wanted

    def wait():
        mine = Turns.attach(run).turn
        assert mine.enter()
        assert not mine.is_wanted
        mine.leave()

    child = crashes.Child(wait)
    _until(lambda: turns.turn.is_wanted)
    assert child.poll() is None
    turns.turn.leave()
    assert child.wait() == 0
    assert turns.turn.enter(LONG_S)
    turns.turn.leave()
    turns.close()


def test_patience_ends_and_whoever_waits_shows_that_it_lives(run, crashes, monkeypatch):
    monkeypatch.setattr("mmrt.shm.turns.BEAT_S", 0.01)
    turns, beats = Turns.create(run), []

    def hold():
        assert Turns.attach(run).turn.enter()
        time.sleep(LONG_S)

    child = crashes.Child(hold)
    _until(lambda: _is_taken(turns.turn))
    assert not turns.turn.enter(0.1, lambda: beats.append(1)) and len(beats) >= 2
    child.kill()
    assert turns.turn.enter(LONG_S)
    turns.turn.leave()


def test_a_turn_alternates_between_two_who_always_want_it(run, crashes):
    """A mutex alone would let the one that is awake keep the other out."""
    turns = Turns.create(run)

    def take_all():
        mine = Turns.attach(run).turn
        for _ in range(50):
            assert mine.enter(LONG_S)
            mine.leave()

    child = crashes.Child(take_all)
    for _ in range(50):
        assert turns.turn.enter(LONG_S)
        turns.turn.leave()
    assert child.wait() == 0


@pytest.mark.parametrize("with_patience", [True, False])
def test_killed_anywhere_its_turn_is_free(run, crashes, with_patience):
    turns = Turns.create(run)

    def compute():
        mine = Turns.attach(run)
        while True:
            if mine.plans.enter(10.0 if with_patience else 0.0):
                if mine.turn.enter():
                    assert mine.turn.is_wanted in (True, False)
                    mine.turn.leave()
                mine.plans.leave()

    def observe():
        for turnstile in (turns.turn, turns.plans):
            assert turnstile.enter(LONG_S), "the dead keep it"
            turnstile.leave()

    enter = Turnstile.enter
    codes = crashes.codes(compute, enter, Turnstile.leave, RobustMutex.acquire, RobustMutex.try_acquire, RobustMutex.release)
    crashes.storm(lambda: crashes.victim(compute, codes), observe, kills=30)


def test_both_killed_in_the_middle_of_a_turn(run, crashes):
    """The one that has it and the one that waits for it."""
    turns = Turns.create(run)

    def compute():
        mine = Turns.attach(run).turn
        assert mine.enter()
        time.sleep(LONG_S)

    for _ in range(5):
        children = [crashes.Child(compute)]
        _until(lambda: _is_taken(turns.turn))
        children.append(crashes.Child(compute))
        _until(lambda: turns.turn.is_wanted)
        for child in crashes.random.sample(children, 2):
            assert child.kill() == -signal.SIGKILL
        assert turns.turn.enter(LONG_S)
        turns.turn.leave()


def test_a_thread_that_ends_leaves_its_turn(run):
    """Stages may be threads of one process."""
    turns = Turns.create(run)
    thread = threading.Thread(target=lambda: Turns.attach(run).turn.enter())
    thread.start()
    thread.join()
    assert turns.turn.enter(LONG_S)


def test_a_c_library_without_monotonic_waits(run, crashes, monkeypatch):
    monkeypatch.setattr(robust_mutex, "_clocklock", None)
    turns = Turns.create(run)

    def hold():
        assert Turns.attach(run).turn.enter()
        time.sleep(LONG_S)

    child = crashes.Child(hold)
    _until(lambda: _is_taken(turns.turn))
    assert not turns.turn.enter(0.05)
    child.kill()
    assert turns.turn.enter(LONG_S)


def test_the_time_of_a_step(run):
    turns = Turns.create(run)
    assert turns.step_s == 0.0
    Turns.attach(run).set_step_s(0.25)
    assert turns.step_s == 0.25


def test_segments_of_others_are_refused(run):
    with pytest.raises(MissingError, match="turns"):
        Turns.attach(run)
    Segment.create(run.segment_path("turns"), HEADER_BYTES, kind="turns").close()
    with pytest.raises(SegmentError, match="asks for"):
        Turns.attach(run)
    os.unlink(run.segment_path("turns"))


def _is_taken(turnstile: Turnstile) -> bool:
    """Look whether somebody is in, from outside."""
    if not turnstile.enter(0.0):
        return True
    turnstile.leave()
    return False


def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
