"""Model checking of the protocol, one fault at a time: hypothesis chooses what happens next and shrinks what fails.

Controller, journal, plan table, rows, page leases and generations are the real ones, in the simulated run of ``recovery_world``. Every
rule is one thing that can happen, each fault among them: the controller dies before a certain effect, an actor dies in what it does,
a message is lost, doubled or overtaken. What must hold is promise 1: every request ends as if nothing had happened, and no page,
plan or row is held at the end.
"""

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from mmrt.tests.runtime.controller.recovery_world import World, make_request
from mmrt.tests.settings import examples

ACTORS = ("video", "encoder", "prefill", "decode", "decode.1", "gateway")
SEEDS = st.integers(0, 2**32)


KINDS = ("kv", "embedding", "state")  # of pools with files; states where the model has recurrent ones


class ProtocolMachine(RuleBasedStateMachine):
    """One run. The world's own dice only choose between equals: which plan is done first, how long a pause is."""

    HAS_STATES = False  # the model has recurrent ones

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory(prefix="mmrt-test-", dir="/dev/shm")
        self.world: World | None = None
        self.num_requests = 0

    @initialize(seed=SEEDS, crowded=st.booleans())
    def start(self, seed: int, crowded: bool) -> None:
        self.world = World(random.Random(seed), Path(self.place.name), crowded, faults=False, has_states=self.HAS_STATES)

    @property
    def run(self) -> World:
        assert self.world is not None
        return self.world

    @rule(seed=SEEDS)
    @precondition(lambda self: self.num_requests < 8)
    def submit(self, seed: int) -> None:
        self.num_requests += 1
        earlier = list(self.run.wanted.values())
        rng, run = random.Random(seed), self.run
        run.submit(make_request(rng, self.num_requests, run.now, run.crowded, earlier, repeats_media=self.HAS_STATES))

    @rule(count=st.integers(1, 60))
    def go_on(self, count: int) -> None:
        for _ in range(count):
            self.run.turn()

    @rule(actor=st.sampled_from(ACTORS))
    def kill(self, actor: str) -> None:
        process = self.run.processes.get(actor)
        if process is not None and process.generation:
            self.run.crash(actor, process)

    @rule(actor=st.sampled_from(ACTORS[:-1]), for_s=st.sampled_from((0.3, 3.0, 20.0)))
    def break_actor(self, actor: str, for_s: float) -> None:
        """The supervisor gives it up for so long, and the controller is told."""
        if actor in self.run.processes:
            self.run.break_actor(actor, for_s)

    @rule(effect=st.integers(0, 40))
    def kill_controller(self, effect: int) -> None:
        """Before its next effect, or that many after it."""
        self.run.crash_at = effect

    @rule()
    @precondition(lambda self: self.world is not None and self.world.io is not None)
    def kill_controller_between_turns(self) -> None:
        self.run.lose_controller()

    @rule()
    @precondition(lambda self: self.world is not None and self.world.io is None)
    def start_controller(self) -> None:
        self.run.controller_up_s = self.run.now

    @rule(at=st.integers(0, 1000))
    def lose(self, at: int) -> None:
        if network := self.run.network:
            del network[at % len(network)]

    @rule(at=st.integers(0, 1000), late_s=st.sampled_from((0.0, 0.3, 2.0)))
    def double(self, at: int, late_s: float) -> None:
        if network := self.run.network:
            sent_s, *rest = network[at % len(network)]
            network.append((sent_s + late_s, *rest))

    @rule(at=st.integers(0, 1000), late_s=st.sampled_from((0.05, 0.5, 3.0)))
    def delay(self, at: int, late_s: float) -> None:
        if network := self.run.network:
            sent_s, *rest = network.pop(at % len(network))
            network.append((sent_s + late_s, *rest))

    @rule()
    @precondition(lambda self: self.world is not None and self.world.io is not None)
    def take_pages(self) -> None:
        self.run.take_pages()

    @rule()
    @precondition(lambda self: self.world is not None and self.world.io is not None)
    def take_row(self) -> None:
        self.run.take_row()

    @rule(pool=st.sampled_from(KINDS))
    @precondition(lambda self: self.world is not None and self.world.io is not None)
    def only_files_have(self, pool: str) -> None:
        """All that the cache holds is saved, and then evicted; the controller knows the file."""
        self.run.save_pages(1.0)
        self.run.look_for_pages()
        self.run.forget_pages(pool)

    @rule(pool=st.sampled_from(KINDS))
    def damage_files(self, pool: str) -> None:
        self.run.damaged.update((pool, key) for key in self.run.saved[pool])

    @rule(pool=st.sampled_from(KINDS))
    def lose_files(self, pool: str) -> None:
        """Their pages are overwritten, and nobody has looked yet."""
        self.run.saved[pool].clear()

    @rule(seconds=st.sampled_from((0.2, 1.0, 5.0)))
    def pause(self, seconds: float) -> None:
        """Everybody stands still, as on a machine that was suspended."""
        self.run.now += seconds

    @invariant()
    def pages_are_held_or_free(self) -> None:
        if self.world is not None and self.world.io is not None:
            for pool in self.world.controller.state.pools.values():
                pool.check()

    def teardown(self) -> None:
        try:
            if self.world is not None:
                try:
                    self.world.calm_down()
                finally:
                    self.world.close()
        finally:
            self.place.cleanup()


class StatesMachine(ProtocolMachine):
    """The same for a model with recurrent states."""

    HAS_STATES = True


@pytest.mark.parametrize(("machine", "num_runs"), [(ProtocolMachine, 60), (StatesMachine, 30)])
def test_promise_one_holds_step_by_step(machine: type[ProtocolMachine], num_runs: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(num_runs),
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
