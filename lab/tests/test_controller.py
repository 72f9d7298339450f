"""The controller's bench keeps a machine in the state that it names, times it, and refuses bad options."""

import json

import pytest

from mmrt.schema.rows import Phase
from mmrt_lab import controller


@pytest.mark.parametrize(("running", "preparing", "waiting"), [(4, 0, 0), (4, 0, 8), (6, 9, 5)])
def test_the_state_is_kept(running: int, preparing: int, waiting: int) -> None:
    drive = controller.Drive(running, preparing, waiting)
    drive.settle()
    state = drive.controller.state
    for turn in range(60):
        drive.turn((controller.WORKERS[turn % 3],))
        assert drive.cpu_s >= 0 and drive.tick_s > 0 and drive.time_plan() > 0
    phases = [request.phase for request in state.rows if request is not None]
    assert abs(phases.count(Phase.DECODE) - running) <= 2
    assert len(state.requests) == running + preparing + waiting
    assert state.totals.admitted > running + preparing, "requests end, and new ones come"
    assert not state.totals.failed


def test_figures(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "STATES", ((2, 2, 2, 1.0),))
    assert controller.main(["--turns", "5"]) == 0
    output = capsys.readouterr().out
    figures = json.loads(output.splitlines()[-1])
    (state,) = figures["states"]
    assert (state["running"], state["preparing"], state["waiting"]) == (2, 2, 2) and min(state["tick_ms"]) > 0
    assert "2, 2, 2" in output


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        controller.main(["--turns", "0"])
    assert caught.value.code == 2 and "--turns 0" in capsys.readouterr().err
