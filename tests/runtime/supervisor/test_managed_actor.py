"""One actor's watchdog, with a clock of the test's own: readiness in time, step deadlines, signs of life."""

import asyncio
import signal
from collections.abc import Callable

import pytest

from mmrt.runtime.process.notify import Notification
from mmrt.runtime.supervisor.managed_actor import ActorSpec, Instance, Step, SupervisedActor
from mmrt.runtime.supervisor.restart_policy import RestartPolicy

SPEC = ActorSpec(name="decode", command=("x",), requires=frozenset({"memory"}), ready_timeout_s=10.0, watchdog_s=3.0)


class FakeProcess:
    """Takes signals and ends by none of them."""

    pid = 1
    started_s = 0.0
    alive = True

    def __init__(self) -> None:
        self.signals: list[signal.Signals] = []

    def signal(self, number: signal.Signals) -> None:
        self.signals.append(number)


class FakeHost:
    policy = RestartPolicy()
    memory_is_ready = True

    async def start_process(self, actor: SupervisedActor) -> Instance:
        raise NotImplementedError

    def is_ready(self, names: frozenset[str]) -> bool:
        return self.memory_is_ready

    def on_started(self, actor: SupervisedActor, instance: Instance) -> None: ...
    def on_ended(self, actor: SupervisedActor, instance: Instance, unexpected: bool) -> None: ...
    def on_active(self, actor: SupervisedActor, instance: Instance) -> None: ...
    def on_state(self, actor: SupervisedActor) -> None: ...
    def on_message(self, actor: str, text: str) -> None: ...
    def can_do_without(self, actor: SupervisedActor, is_misconfigured: bool) -> bool:
        return True

    def on_outage(self, actor: SupervisedActor) -> None: ...
    def on_failed(self, actor: SupervisedActor, reason: str) -> None: ...


class World:
    def __init__(self) -> None:
        self.host = FakeHost()
        self.actor = SupervisedActor(SPEC, self.host)
        self.instance = Instance(FakeProcess(), None)  # type: ignore[arg-type]
        self.instance.beat_s = 0.0
        self.actor.current = self.instance

    def tell(self, at_s: float, **what: object) -> None:
        self.actor.on_notification(self.instance, Notification(1, generation=1, **what))  # type: ignore[arg-type]
        self.instance.beat_s = at_s

    def killed(self, at_s: float, deadline_s: float = 0.0) -> str:
        """Why the process is killed at this time, "" if it is not."""
        steps = {"decode": Step(deadline_s - 3, deadline_s), "prefill": Step(deadline_s + 0.1, deadline_s + 5)}
        return self.killed_in(at_s, steps if deadline_s else {})

    def killed_in(self, at_s: float, steps: dict[str, Step]) -> str:
        self.actor.check(at_s, {self.instance.process.pid: steps})
        return self.instance.killed_because


def run(test: Callable[[World], None]) -> None:
    async def main() -> None:
        test(World())

    asyncio.run(main())


def test_ready_in_time() -> None:
    @run
    def _(world: World) -> None:
        assert not world.killed(9.9)
        assert world.killed(10.1) == "not ready within 10 s"
        assert world.instance.process.signals == [signal.SIGKILL]  # type: ignore[attr-defined]


def test_time_spent_waiting_for_memory_does_not_count() -> None:
    @run
    def _(world: World) -> None:
        world.host.memory_is_ready = False
        assert not world.killed(100.0)
        world.host.memory_is_ready = True
        assert not world.killed(109.0)
        assert world.killed(110.5)


def test_a_loading_actor_can_ask_for_more_time() -> None:
    @run
    def _(world: World) -> None:
        world.instance.extended_until_s = 500.0
        assert not world.killed(499.0)
        assert world.killed(501.0)


def test_signs_of_life() -> None:
    @run
    def _(world: World) -> None:
        world.tell(0.0, active=True)
        world.tell(5.0, watchdog=True)
        assert not world.killed(7.9)
        assert world.killed(8.1) == "hang: no sign of life for 3 s"


def test_a_step_may_take_as_long_as_it_has_declared_and_no_longer() -> None:
    @run
    def _(world: World) -> None:
        world.tell(0.0, active=True)
        for now_s in range(1, 60):
            assert not world.killed(now_s, deadline_s=60.0)
        assert not world.killed(61.5), "the step is over, and the silence since is short"
        assert not world.killed(62.0, deadline_s=70.0)
        assert world.killed(70.5, deadline_s=70.0) == "hang: a step is 0.5 s past its deadline"
        assert world.instance.suspects == ["decode"]


def test_all_that_is_under_way_at_a_deadline_is_suspected() -> None:
    """A step of another actor of the process may be what holds up the one that is overdue."""

    @run
    def _(world: World) -> None:
        world.tell(1.0, active=True)
        steps = {"encoder": Step(10.0, 300.0), "decode": Step(40.0, 70.0), "prefill": Step(70.2, 90.0)}
        assert not world.killed_in(69.0, steps) and world.killed_in(70.5, steps)
        assert world.instance.suspects == ["encoder", "decode"]


def test_a_supervisor_that_was_stopped_blames_nobody() -> None:
    @run
    def _(world: World) -> None:
        world.tell(0.0, active=True)
        world.actor.excuse(1000.0)
        assert not world.killed(1000.0)
        assert world.killed(1003.1)


def test_a_step_that_was_stopped_together_with_the_supervisor_may_go_on() -> None:
    @run
    def _(world: World) -> None:
        world.tell(0.0, active=True)
        world.actor.excuse(1000.0)
        assert not world.killed(1000.5, deadline_s=60.0)
        assert not world.killed(1002.9, deadline_s=60.0)
        assert world.killed(1003.1, deadline_s=60.0)


def test_a_warm_candidate_waits_as_long_as_its_predecessor_takes() -> None:
    @run
    def _(world: World) -> None:
        world.tell(0.0, ready=True)
        world.actor.current, world.actor.candidate = None, world.instance
        assert not world.killed(100.0)
        world.actor.current, world.actor.candidate = world.instance, None
        assert not world.killed(109.0)
        assert world.killed(111.0) == "not ready within 10 s"


@pytest.mark.parametrize(("what", "state"), [({}, "starting"), ({"ready": True}, "standby"), ({"active": True}, "active")])
def test_states_follow_what_the_process_says(what: dict[str, bool], state: str) -> None:
    @run
    def _(world: World) -> None:
        world.tell(0.0, **what)
        assert world.actor.state == state
        assert world.actor.ready == (state == "active")
