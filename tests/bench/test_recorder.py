"""The bench of the flight recorders: a record costs microseconds, and bad options are refused."""

import pytest

from mmrt.bench.micro.recorder import main, measure_record


def test_a_record_is_cheap() -> None:
    record_s, read_s = measure_record()
    assert 0 < record_s < 50e-6
    assert 0 < read_s < 0.5


@pytest.mark.parametrize("option", ["--streams", "--tokens"])
def test_bad_options(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([option, "0"])
    assert caught.value.code == 2
    assert f"{option} 0" in capsys.readouterr().err
