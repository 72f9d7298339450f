"""The bench of the flight recorders times a record and a reading, and refuses bad options."""

import pytest

from mmrt.bench.micro.recorder import main, measure_record


def test_a_record_is_timed() -> None:
    record_s, read_s = measure_record()
    assert 0 < record_s < read_s


@pytest.mark.parametrize("option", ["--streams", "--tokens"])
def test_bad_options(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([option, "0"])
    assert caught.value.code == 2
    assert f"{option} 0" in capsys.readouterr().err
