"""The controller's process around the machine: real socket, tables and journal, in one event loop with stand-ins for the actors."""

import asyncio
import errno
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrt.actors.controller.flight import ControllerFlight
from mmrt.actors.controller.io import ControllerIO
from mmrt.actors.controller.journal import Journal
from mmrt.actors.controller.limits import objective_of
from mmrt.actors.controller.outage_watch import OutageWatch
from mmrt.actors.controller.policy_guard import PolicyGuard
from mmrt.actors.controller.policy_switch import PolicySwitch
from mmrt.actors.controller.serve import Serving, active_generations, left_in
from mmrt.cli.cache import clear_caches
from mmrt.runtime.bus import messages as m
from mmrt.runtime.bus import plans as p
from mmrt.runtime.bus.transport import ActorSocket, ControllerSocket, drain_in_loop
from mmrt.runtime.bus.wire import Wire
from mmrt.runtime.config.runtime_config import parse_config
from mmrt.runtime.controller import machine
from mmrt.runtime.controller.recovery import recover
from mmrt.runtime.controller.scheduling.facts import Objective
from mmrt.runtime.controller.scheduling.types import Limits
from mmrt.runtime.controller.state.effects import ClearPages, Effect, KeepEra, Send, SetPageGenerations, WriteState
from mmrt.runtime.controller.state.records import JournalState
from mmrt.runtime.process.saved_pages import SavedFiles, write_saved_files
from mmrt.runtime.stage_table import ACTORS
from mmrt.schema.rows import EndCode, Phase
from mmrt.shm.controller_stats import ControllerStats, StatsSnapshot
from mmrt.shm.flight_recorder import FlightRecorder
from mmrt.shm.plan_table import PlanTable
from mmrt.shm.pool import PagePool
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.sequence_table import SequenceTable
from mmrt.shm.status import ActorState, ActorTable, Membership
from mmrt.shm.step_gaps import StepGaps

LIMITS = Limits(
    num_rows=2, max_context=64, kv_page_tokens=4, num_kv_pages=32, media_page_bytes=8, num_media_pages=4, patch_page_bytes=16,
    num_patch_pages=4, embedding_page_tokens=4, num_embedding_pages=4, num_plan_slots=4, prefill_budget=16, encode_budget=16,
)  # fmt: skip
DEFINITION = m.RequestSpec(m.Generation("r"), [1, 2, 3, 4, 5], [], 3)
TIMEOUT_S = 20.0


@pytest.fixture
def run() -> Iterator[RunDirectory]:
    with tempfile.TemporaryDirectory(prefix="mmrt-test-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as place:
        directory = RunDirectory.create(Path(place) / "run", {})
        SequenceTable.create(directory, 2, 64, 16, max_spec_bytes=4096, max_state_bytes=4096).close()
        PlanTable.create(directory, 4, 4096).close()
        for name, count in (("media", 4), ("patch", 4), ("embedding", 4), ("kv", 32)):
            PagePool.create(directory, name, count, 8).close()
        ControllerStats.create(directory).close()
        StepGaps.create(directory, 2).close()
        ActorTable.create(directory, ACTORS).close()
        FlightRecorder.create(directory, "controller", 256).close()
        yield directory
        directory.destroy()


def test_objectives_come_from_the_configuration() -> None:
    config = parse_config("[slo.text]\nttft_ms = 250\ntbt_ms = 40\n")
    assert objective_of(config, "text") == Objective(0.25, 0.04) and objective_of(config, "video") == Objective(20.0, 0.0)


class Epoch:
    """One generation of the controller in this event loop."""

    def __init__(self, run: RunDirectory, epoch: int, limits: Limits = LIMITS) -> None:
        self.io = ControllerIO(run, ACTORS)
        self.journal, journaled = Journal.open(run.path)
        self.controller = recover(limits, epoch, self.io.snapshot(journaled, {}))
        self.socket = ControllerSocket(run.path)
        self.stats = ControllerStats.attach(run, writable=True)
        self.failed = asyncio.Event()
        flight = ControllerFlight(FlightRecorder.attach(run, "controller").writer(epoch), self.controller.state, ACTORS)
        outages = OutageWatch(run, 30.0, ACTORS)
        policies = PolicySwitch(run.path, "unified", self.controller.state, PolicyGuard())
        self.actors = ActorTable.attach(run, writable=False)
        self.serving = Serving(
            self.controller, self.io, self.journal, self.socket, self.stats, outages, flight, policies, self.actors, self.failed.set
        )

    def close(self) -> None:
        self.serving.close()
        self.socket.close()
        self.journal.close()
        self.io.close()
        self.actors.close()
        self.stats.close()


class Peer:
    """An actor's end of the bus."""

    def __init__(self, run: RunDirectory, name: str) -> None:
        self.name = name
        self.socket = ActorSocket(run.path, name, 1)
        self.received: asyncio.Queue[m.ToActor] = asyncio.Queue()
        self.reader = drain_in_loop(asyncio.get_running_loop(), self.socket, self.received.put_nowait)

    async def say(self, *sent: m.ToController) -> None:
        """Send, and again while the controller is away."""
        for message in sent:
            while not self.socket.send(message):  # noqa: ASYNC110 - nothing tells when a socket is connected
                await asyncio.sleep(0.005)
            self.reader.poke()

    async def hello(self, epoch: int) -> None:
        """As actors do: again until this controller has heard it, for what goes into a dying connection is lost."""
        while True:
            await self.say(m.Hello(self.name, 1, 1, True))
            try:
                while await asyncio.wait_for(self.received.get(), 0.2) != m.Welcome(epoch):
                    pass
                return
            except TimeoutError:
                continue

    async def wait_for(self, kind: type[Wire]) -> Any:
        while not isinstance(message := await asyncio.wait_for(self.received.get(), TIMEOUT_S), kind):
            pass
        return message

    def close(self) -> None:
        self.reader.close()
        self.socket.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for is shared memory
        await asyncio.sleep(0.005)


def in_loop(body: Callable[[ExitStack], Coroutine[Any, Any, None]]) -> None:
    """Run ``body`` in an event loop; what it hands to the stack is closed whatever happens."""

    async def run() -> None:
        with ExitStack() as stack:
            await asyncio.wait_for(body(stack), 3 * TIMEOUT_S)

    asyncio.run(run())


def test_a_request_across_two_controllers(run: RunDirectory) -> None:
    async def body(stack: ExitStack) -> None:
        table = stack.enter_context(closing(SequenceTable.attach(run)))
        plans = stack.enter_context(closing(PlanTable.attach(run)))
        first = Epoch(run, 1)
        with closing(first):
            gateway, prefill, decode = (stack.enter_context(closing(Peer(run, name))) for name in ("gateway", "prefill", "decode"))
            for peer in (gateway, prefill, decode):
                await peer.hello(1)
            await gateway.say(m.Submit(1, 5, DEFINITION))
            assert await gateway.wait_for(m.Prepared) == m.Prepared(1, 5, 5)
            command = await prefill.wait_for(m.Run)  # closing now is as good as killing: nothing is handed over

        second = stack.enter_context(closing(Epoch(run, 2)))
        for peer in (gateway, prefill, decode):
            await peer.hello(2)
        again = await prefill.wait_for(m.Run)
        assert again == m.Run(2, command.slot, command.plan_id), "outstanding plans are sent again under the new epoch"
        payload = plans.read(again.slot, again.plan_id)
        assert payload is not None
        assert p.decode_plan(payload) == p.Prefill([p.PrefillChunk(0, 1, 0, 0, 4, [])])
        await prefill.say(m.PlanDone("prefill", 1, again.plan_id, 0.01, m.Done()))
        admit = await decode.wait_for(m.Admit)
        assert table.phase(admit.row) == (1, Phase.DECODE) and table.prefilled[admit.row].tolist() == [4, 0]
        table.commit(np.array([admit.row]), np.array([1]), np.array([7]))
        table.set_end(admit.row, 1, EndCode.STOP)
        await decode.say(m.SequenceEnded(1, admit.row, 1))
        drop = await decode.wait_for(m.Drop)
        await gateway.say(m.Delivered(1, 5))
        assert await gateway.wait_for(m.Released) == m.Released(2, 5)
        assert table.phase(admit.row) == (1, Phase.ENDING), "decode has not let go yet"
        await decode.say(m.Dropped(1, drop.row, drop.row_generation, drop.ticket))
        await until(lambda: table.phase(admit.row) == (1, Phase.FREE))
        assert not plans.live()
        await until(lambda: all(pool.used == 0 for pool in second.stats.read().pools.values()))
        snapshot = second.stats.read()
        assert snapshot.epoch == 2 and snapshot.finished_total == 1

    in_loop(body)


def cannot_write(epoch: Epoch, error: Exception) -> None:
    def append(record: object) -> None:
        raise error

    epoch.journal.append = append  # type: ignore[method-assign, assignment]


def test_a_request_that_cannot_be_journaled_is_refused(run: RunDirectory) -> None:
    async def body(stack: ExitStack) -> None:
        epoch = stack.enter_context(closing(Epoch(run, 1)))
        gateway = stack.enter_context(closing(Peer(run, "gateway")))
        await gateway.hello(1)
        append = epoch.journal.append
        cannot_write(epoch, OSError(errno.ENOSPC, "no space"))
        await gateway.say(m.Submit(1, 5, DEFINITION))
        failed = await gateway.wait_for(m.Failed)
        assert (failed.key, failed.status) == (5, 503) and failed.retry_after_s is not None
        epoch.journal.append = append  # type: ignore[method-assign]
        await gateway.say(m.Submit(1, 6, DEFINITION))
        assert (await gateway.wait_for(m.Prepared)).key == 6
        assert epoch.serving.failure is None

    in_loop(body)


def test_the_command_line_clears_the_caches(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """Only what no row holds; and a later controller does not find it either."""
    keys = [bytes([number]) * 16 for number in range(3)]

    async def body(stack: ExitStack) -> None:
        with closing(Epoch(run, 1)) as epoch:
            state = epoch.controller.state
            for row, pool in ((0, "kv"), (1, "kv"), (0, "embedding")):
                granted = state.pools[pool].allocate(row, 1)
                assert granted is not None
                state.emit(SetPageGenerations(pool, granted))
                state.name_pages(pool, granted.pages, [keys[row]])
                if row == 0:
                    state.pools[pool].retire(row)
            state.known_media.learn_large((b"", b"", b"content"))
            epoch.serving._perform(epoch.controller._take_effects())
            assert sum(len(pool.read_keys()) for pool in epoch.io.pools.values()) == 3
            cleared = await asyncio.to_thread(clear_caches, run.path)
            assert [(pool.pool, pool.num_forgotten, pool.num_held) for pool in cleared.pools if pool.num_forgotten] == [
                ("embedding", 1, 0),
                ("kv", 1, 1),
            ]
            assert [pool.cache.num_idle for pool in state.pools.values()] == [0, 0, 0, 0]
            assert sum(map(len, [pool.read_keys() for pool in epoch.io.pools.values()])) == 1, "the page of row 1"
            assert not state.known_media.find((b"", b"", b"content")).is_large
            again = await asyncio.to_thread(clear_caches, run.path)
            assert [pool.num_forgotten for pool in again.pools] == [0, 0, 0, 0]
            assert epoch.serving.failure is None
        after = stack.enter_context(closing(Epoch(run, 2)))
        assert after.controller.state.pools["embedding"].cache.find(keys[0]) is None
        gone = Peer(run, "cache")  # leaves without waiting for its answer
        await gone.say(m.ClearCaches())
        gone.close()
        assert (await asyncio.to_thread(clear_caches, run.path)).epoch == 2 and after.serving.failure is None

    in_loop(body)


def test_an_effect_that_fails_ends_the_actor(run: RunDirectory) -> None:
    """The machine is ahead of memory then: only a recovery puts that right."""

    async def body(stack: ExitStack) -> None:
        with closing(Epoch(run, 1)) as epoch:
            gateway = stack.enter_context(closing(Peer(run, "gateway")))
            await gateway.hello(1)
            cannot_write(epoch, OSError(errno.EIO, "broken"))
            await gateway.say(m.Submit(1, 5, DEFINITION))
            await asyncio.wait_for(epoch.failed.wait(), TIMEOUT_S)
            assert isinstance(epoch.serving.failure, OSError)
            assert epoch.io.table.phase(0) == (0, Phase.FREE), "nothing after the failed effect was done"
        after = stack.enter_context(closing(Epoch(run, 2)))
        assert not after.controller.state.requests

    in_loop(body)


def test_a_message_that_breaks_the_machine_ends_the_actor(run: RunDirectory) -> None:
    """What it has done of it, in state and effects, must not be continued from."""

    async def body(stack: ExitStack) -> None:
        epoch = stack.enter_context(closing(Epoch(run, 1)))
        gateway = stack.enter_context(closing(Peer(run, "gateway")))
        await gateway.hello(1)

        def broken(*_: object) -> list[Effect]:
            raise AssertionError("broken")

        epoch.controller.on_message = broken  # type: ignore[method-assign]
        await gateway.say(m.Submit(1, 5, DEFINITION))
        await asyncio.wait_for(epoch.failed.wait(), TIMEOUT_S)
        assert isinstance(epoch.serving.failure, AssertionError)

    in_loop(body)


def test_counts_that_cannot_be_published_end_the_actor(run: RunDirectory) -> None:
    """Otherwise its timer would stop, and the run with it."""

    async def body(stack: ExitStack) -> None:
        epoch = stack.enter_context(closing(Epoch(run, 1)))

        def broken(_: StatsSnapshot) -> None:
            raise ValueError("broken")

        epoch.stats.publish = broken  # type: ignore[method-assign]
        await asyncio.wait_for(epoch.failed.wait(), TIMEOUT_S)
        assert isinstance(epoch.serving.failure, ValueError)

    in_loop(body)


def test_a_change_is_published_though_nothing_follows(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the next tick of an idle controller."""
    monkeypatch.setattr(machine, "IDLE_S", 3 * TIMEOUT_S)

    async def body(stack: ExitStack) -> None:
        epoch = stack.enter_context(closing(Epoch(run, 1, replace(LIMITS, resend_s=3 * TIMEOUT_S))))
        gateway = stack.enter_context(closing(Peer(run, "gateway")))
        published = list[StatsSnapshot]()
        publish = epoch.stats.publish

        def note(stats: StatsSnapshot) -> None:
            published.append(stats)
            publish(stats)

        epoch.stats.publish = note  # type: ignore[method-assign]
        await gateway.hello(1)
        while not published:  # noqa: ASYNC110 - the next change comes right after
            await asyncio.sleep(0.001)
        await gateway.say(m.Submit(1, 1, DEFINITION))
        await asyncio.wait_for(until(lambda: epoch.stats.read().preparing == 1), TIMEOUT_S)

    in_loop(body)


def test_effects_that_are_none_are_refused(run: RunDirectory) -> None:
    io = ControllerIO(run, ACTORS)
    io.perform(ClearPages(0))
    with pytest.raises(AssertionError, match="Send is no effect on memory"):
        io.perform(Send("decode", 1, m.Welcome(1)))
    with pytest.raises(ValueError, match="exceeds 4096"):
        io.perform(WriteState(0, bytes(5000)))
    io.close()


def test_an_era_that_cannot_be_kept_costs_a_line(run: RunDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(ControllerIO(run, ACTORS, cache=tmp_path)) as io:
        io.perform(KeepEra(b"e" * 16))
        assert not caplog.text and io.snapshot(JournalState(), {}).kept_era == b"", "there are no files"
        write_saved_files(run.path, SavedFiles({}, str(tmp_path / "era")))
        io.perform(KeepEra(b"e" * 16))
        assert io.snapshot(JournalState(), {}).kept_era == b"e" * 16
        (tmp_path / "era").write_bytes(b"")
        assert io.snapshot(JournalState(), {}).kept_era == b"" and "has 0 bytes, not 16" in caplog.text
        write_saved_files(run.path, SavedFiles({}, str(tmp_path / "gone" / "era")))
        io.perform(KeepEra(b"f" * 16))
        assert not (tmp_path / "gone").exists() and "gone/era, which is not in cache.dir" in caplog.text
        assert "later runs will find what was cleared: [Errno 1]" in caplog.text


def test_active_generations_are_those_that_say_so(run: RunDirectory) -> None:
    actors = ActorTable.attach(run)
    actors.writer("decode", 4).set_state(ActorState.ACTIVE)
    actors.writer("prefill", 2).set_state(ActorState.STOPPING)
    assert active_generations(actors) == {"decode": 4}
    actors.close()


def test_a_standby_knows_plans_of_actors_that_came_while_it_waited(run: RunDirectory) -> None:
    io = ControllerIO(run, ACTORS)
    with closing(ActorTable.attach(run, writable=True)) as actors:
        actors.set_membership("encoder.1", Membership.PRESENT)
        io.plans.write(0, 7, len(ACTORS), b"plan")
        assert [plan.actor for plan in left_in(io, actors, JournalState()).plans] == ["encoder.1"]
    io.close()
