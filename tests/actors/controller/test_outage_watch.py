"""How the controller learns what is broken: from the supervisor's table, and without a supervisor by absence."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mmrt.actors.controller.outage_watch import OutageWatch
from mmrt.runtime.stage_table import ACTORS, MAX_INSTANCES, InstanceId, actors_of, replaceable
from mmrt.schema.outage import Outage
from mmrt.shm.controller_stats import ControllerStats, StatsSnapshot
from mmrt.shm.errors import MissingError
from mmrt.shm.outages import OutageTable
from mmrt.shm.role_lock import RoleLock
from mmrt.shm.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    directory = RunDirectory.create(tmp_path / "run", {})
    yield directory
    directory.destroy()


def test_what_the_supervisor_says(run: RunDirectory) -> None:
    table = OutageTable.create(run)
    watch = OutageWatch(run, 30.0, ACTORS)
    assert watch.changed(1e9) is None, "absence says nothing where somebody supervises"
    broken = (Outage("video", "exit status 1", 12.5), Outage("encoder", "x" * 1000))
    table.publish(broken)
    found = watch.changed(0.0)
    assert found is not None and found[0] == broken[0] and found[1].reason == "x" * 300
    assert watch.changed(0.0) is None
    late = OutageWatch(run, 30.0, ACTORS)
    assert late.changed(0.0) == found, "a new controller is told too"
    table.publish(())
    assert watch.changed(0.0) == () and OutageTable.attach(run).read() == ()
    for part in (watch, late, table):
        part.close()


def test_every_actor_of_the_largest_run_may_be_broken_for_a_long_reason(run: RunDirectory) -> None:
    actors = actors_of(f"{MAX_INSTANCES}E+{MAX_INSTANCES}P+D")
    with closing(OutageTable.create(run)) as table, closing(ControllerStats.create(run)) as stats:
        table.publish(tuple(Outage(actor, "a" + "模型目录" * 75, 1e9) for actor in actors))
        found = table.read()
        assert [outage.actor for outage in found] == list(actors)
        assert {outage.reason for outage in found} == {"a" + ("模型目录" * 75)[:99]}, "no half of a character"
        broken = {outage.actor: outage.reason for outage in found}
        stats.publish(StatsSnapshot(broken=broken))
        assert stats.read().broken == broken


def test_who_is_dead_at_this_moment(run: RunDirectory) -> None:
    first, second = map(InstanceId, ("decode", "decode.1"))
    watch = OutageWatch(run, 30.0, ACTORS)
    with RoleLock(run, first) as one, RoleLock(run, second) as other:
        assert one.try_acquire() and other.try_acquire()
        assert watch.absent([first, second], 10.0) == set()
        other.release()
        assert watch.absent([first, second], 10.001) == set(), "not at every tick"
        assert watch.absent([first, second], 10.1) == {second}
        assert other.try_acquire()
        assert watch.absent([first, second], 10.2) == set()
    watch.close()


def test_without_a_supervisor_who_is_absent_for_long_is_broken(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    with pytest.raises(MissingError):
        OutageTable.attach(run)
    locks = {actor: RoleLock(run, actor) for actor in replaceable()}
    for lock in locks.values():
        assert lock.try_acquire()
    watch = OutageWatch(run, 30.0, ACTORS)
    assert watch.changed(200.0) is None
    locks["video"].release()
    assert watch.changed(229.0) is None, "it may be on its way"
    (outage,) = watch.changed(231.0) or ()
    assert (outage.actor, outage.next_probe_s) == ("video", 0.0) and "no process of it for 30 s" in outage.reason
    assert watch.changed(231.5) is None and watch.changed(240.0) is None
    with RoleLock(run, "video") as back:
        assert back.try_acquire()
        assert watch.changed(241.5) == []
    for lock in locks.values():
        lock.close()
    watch.close()
