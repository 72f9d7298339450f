"""The bench of idle cores runs a model with and without them."""

import json
from pathlib import Path

import pytest

from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.process.processors import plan_threads, read_processors
from mmrt_lab.micro.cores import FIGURES, _without_idle_cores, main


@pytest.mark.slow
def test_all_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--rounds", "1", "--tokens", "40", "--size", "56x56", "--phase", "1"]
    assert main([*small, "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert [figure["name"] for figure in figures] == list(FIGURES)
    assert all(figure[run][0] > 0 for figure in figures for run in ("own", "lent")) and "a text alone" in capsys.readouterr().out


def test_one_of_the_runs_has_its_own_cores_only() -> None:
    own = plan_threads(_without_idle_cores(RuntimeConfig()), read_processors())
    for name in ("encoder", "prefill", "decode"):
        assert own.most_threads(name) == own.actor(name).threads == plan_threads(RuntimeConfig(), read_processors()).actor(name).threads


@pytest.mark.parametrize("options", [["--rounds", "0"], ["--tokens", "0"]])
def test_bad_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(options)
    assert caught.value.code == 2 and "at least 1" in capsys.readouterr().err
