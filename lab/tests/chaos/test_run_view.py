"""What a storm sees of a run's phases."""

from mmrt.schema.gap_buckets import longest_s
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.status import ActorTable, Membership
from mmrt.shm.step_gaps import StepGaps
from mmrt_lab.chaos.run_view import RunView


def test_a_step_of_any_encoder_is_a_phase(run: RunDirectory) -> None:
    view, table = RunView(run.path, supervisor_pid=0), ActorTable.attach(run)
    assert view.phases() == {"idle"}
    with table.writer("encoder.1", 1).step(7, deadline_s=60):
        assert view.phases() == {"encoding"}
    assert view.phases() == {"idle"}
    view.close()
    table.close()


def test_actors_come_and_go(run: RunDirectory) -> None:
    view, table = RunView(run.path, supervisor_pid=0), ActorTable.attach(run, writable=True)
    before = view.actors
    assert view.pid("decode.2") is None
    table.set_membership("decode.2", Membership.PRESENT)
    assert view.actors == (*before, "decode.2") and "decode.2" in view.serving().missing
    table.set_membership("decode.2", Membership.GONE)
    assert view.actors == before and "decode.2" not in view.serving().missing
    view.close()
    table.close()


def test_times_between_tokens_are_those_of_each_decode(run: RunDirectory) -> None:
    view, gaps = RunView(run.path, supervisor_pid=0), StepGaps.attach(run, 1)
    gaps.add(30_000_000, 2)
    found = view.gaps()
    assert (sum(found["decode"]), sum(found["decode.1"])) == (0, 2) and longest_s(found["decode"]) == 0.0
    assert 0.030 < longest_s(found["decode.1"]) < 0.033
    view.close()
    gaps.close()
