"""The bench of servers in turns: one that is up beside one that is not, and bad command lines."""

import json
import secrets
from pathlib import Path

import pytest

from mmrt.bench.own_run import own_run
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import ServerSection
from mmrt_lab.micro.sides import loads_of, main


@pytest.mark.slow
def test_a_server_beside_itself_and_beside_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "figures.json"
    monkeypatch.setattr(secrets, "randbelow", lambda most: most - 5)
    with own_run("sides") as run:
        run.up(RuntimeConfig(server=ServerSection(port=0)))
        url = str(json.loads(run.command("status", "--json")[1])["endpoint"])
        sides = [f"here={url}", f"again={url}", "nobody=http://127.0.0.1:9"]
        assert main([*sides, "--rounds", "1", "--tokens", "20", "40", "--loads", "one", "four", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["first_seed"] == (1 << 31) - 5
    assert all(its["here"][0] > 0 and its["again"][0] > 0 and not its["nobody"] for its in found["values"].values())
    assert (
        set(found["failures"]) == {"nobody, one of 20 tokens", "nobody, one of 40 tokens", "nobody, four"} and len(found["loads"]) == 1
    )
    said = capsys.readouterr().out
    assert "four streams: tokens/s" in said and "nobody, one of 20 tokens" in said


def test_each_number_of_tokens_is_a_load() -> None:
    loads = loads_of(["one", "picture"], [240, 1010], 8.0)
    assert list(loads) == ["one of 240 tokens", "one of 1010 tokens", "picture"]
    assert "--input-tokens 1010" in loads["one of 1010 tokens"].line
    figures = [figure for load in loads.values() for figure in load.figures]
    assert len(set(figures)) == 6 and "one request of 240 tokens: TTFT, ms" in figures


@pytest.mark.parametrize(
    ("options", "said"),
    [(["mmrt"], "NAME=URL"), (["a=http://x", "a=http://y"], "one name"), (["a=http://x", "--tokens", "9", "0"], "at least 1")],
)
def test_bad_options(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(options)
    assert caught.value.code == 2 and said in capsys.readouterr().err


def test_no_server_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nobody=http://127.0.0.1:9", "--rounds", "1", "--loads", "one"]) == 1
    assert "nobody, one" in capsys.readouterr().err
