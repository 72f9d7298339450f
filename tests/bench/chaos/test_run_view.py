"""What a storm sees of a run's phases."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mmrt.bench.chaos.run_view import RunView
from mmrt.runtime.stage_table import actors_of
from mmrt.shm.controller_stats import ControllerStats
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.sequence_table import SequenceTable
from mmrt.shm.status import ActorTable


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    directory = RunDirectory.create(tmp_path / "run", {})
    ActorTable.create(directory, actors_of("2E+P+D")).close()
    ControllerStats.create(directory).close()
    SequenceTable.create(directory, 2, 64, 16).close()
    yield directory
    directory.destroy()


def test_a_step_of_any_encoder_is_a_phase(run: RunDirectory) -> None:
    view, table = RunView(run.path, supervisor_pid=0), ActorTable.attach(run)
    assert view.phases() == {"idle"}
    with table.writer("encoder.1", 1).step(7, deadline_s=60):
        assert view.phases() == {"encoding"}
    assert view.phases() == {"idle"}
    view.close()
    table.close()
