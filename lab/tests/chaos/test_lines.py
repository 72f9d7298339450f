"""Orders to die at lines, and a storm of such deaths."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrt.bench.processes import SUPERVISOR, ZYGOTE
from mmrt.runtime.bus.line_faults import HEAD, key_of, order_path
from mmrt_lab.chaos.bystanders import Bystanders
from mmrt_lab.chaos.faults import LINE, PHASES, Cell, Fault, cells, fault_at
from mmrt_lab.chaos.lines import LineOrders
from mmrt_lab.chaos.options import parse_options
from mmrt_lab.chaos.verdict import Outcome, Trouble, is_excused


def die(faults: Path, name: str, line: str) -> None:
    """As the process does it."""
    text = line.encode()
    with order_path(faults, name).open("r+b") as file:
        file.write(HEAD.pack(0, 0, 0, len(text)) + text)


def test_lines_are_known_once_somebody_has_died_there(tmp_path: Path) -> None:
    orders = LineOrders(tmp_path / "faults", ("decode", "video"))
    orders.order("decode", 7, True)
    assert HEAD.unpack(order_path(tmp_path / "faults", "decode").read_bytes()[: HEAD.size]) == (7, 1, 0, 0)
    assert orders.found("decode") == orders.take_back("video") == ""
    die(tmp_path / "faults", "decode", "actors/decode/loop.py:3")
    assert orders.found("decode") == orders.take_back("decode") == "actors/decode/loop.py:3"
    orders.order("video", 1, False)
    assert HEAD.unpack(order_path(tmp_path / "faults", "video").read_bytes()[: HEAD.size]) == (1, 0, 1, 0)
    assert key_of("actors/decode/loop.py:3").to_bytes(4, "little") in order_path(tmp_path / "faults", "video").read_bytes()
    orders.close()


def test_the_supervisor_dies_in_mid_stream_alone() -> None:
    """Each of its deaths ends a run."""
    options = parse_options(["--lines"])
    assert options.kinds == [LINE] and options.num_faults == 1000 and options.pairs == 0.2 and not options.num_drains
    choice = options.storm_cells
    assert [cell.phase for cell in choice if cell.target == SUPERVISOR] == ["mid-stream"]
    assert {cell.target for cell in choice} >= {"gateway", "video", "memory", ZYGOTE}
    faults = [fault_at(1, index, choice, 0.2) for index in range(300)]
    assert all(1 <= fault.num_lines < 256 for fault in faults) and not any(f.second for f in faults if f.cell.target == SUPERVISOR)
    starts = [fault for fault in faults if fault.is_at_start]
    assert 20 < len(starts) < 120 and not {ZYGOTE, SUPERVISOR} & {fault.cell.target for fault in starts}
    assert not cells(["kill"], [SUPERVISOR], PHASES)
    assert parse_options(["--lines", "--pairs", "0.5"]).filters == "--lines --pairs 0.5 "


def test_it_goes_with_no_other_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    for other in (["--kinds", "kill"], ["--soak"]):
        with pytest.raises(SystemExit):
            parse_options(["--lines", *other])
        assert "do not go with it" in capsys.readouterr().err


def fault(target: str, *, is_at_start: bool = False) -> Fault:
    return Fault(seed=1, index=1, cell=Cell(LINE, target, "mid-stream"), delay_s=0.0, length_s=0.0, is_at_start=is_at_start)


def test_only_the_death_of_the_supervisor_excuses_broken_connections() -> None:
    outcome = Outcome(request="text", end="broken", began_s=1.0, ended_s=2.0)
    assert is_excused(outcome, [Trouble(fault(SUPERVISOR), 1.0, 2.0)])
    assert not is_excused(outcome, [Trouble(fault("gateway"), 1.0, 2.0)])


def test_a_death_at_the_start_replaces_an_actor_twice() -> None:
    watched = Bystanders(lambda names: names, {"decode": 1})
    assert watched.check({"decode": 3}, fault("decode", is_at_start=True)) == []
    assert watched.check({"decode": 5}, fault("decode")) == ["decode was replaced 2 times, but it was hit once: its generation is 5"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_storm_of_lines(storm: Callable[..., dict[str, Any]]) -> None:
    report = storm("--lines", "--faults", "100", timeout_s=1780)
    lines = [line for hit in report["hits"] for line in hit["lines"]]
    assert report["problems"] == [] and len(lines) > 80 and len({*lines}) == len(lines)
