"""The bench of journal and flight recorders times a request, a record and a reading, and refuses bad options."""

from pathlib import Path

import pytest

from mmrt.shm.run_directory import RunDirectory
from mmrt_lab.micro.recorder import main, measure_record, measure_request


def test_a_request_is_timed(tmp_path: Path) -> None:
    cost = measure_request(tmp_path, 512, 2000)
    assert cost.with_s > 0 and cost.without_s > 0
    assert cost.compactions >= 1  # what has ended does not stay
    assert not list(tmp_path.iterdir())


def test_a_record_is_timed() -> None:
    record_s, read_s = measure_record(RunDirectory.default_path().parent.parent)
    assert 0 < record_s < read_s


@pytest.mark.parametrize("option", ["--streams", "--tokens"])
def test_bad_options(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([option, "0"])
    assert caught.value.code == 2
    assert f"{option} 0" in capsys.readouterr().err
