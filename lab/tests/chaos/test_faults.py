"""Which fault comes when: the same for the same seed, and every cell before any comes twice."""

import pytest

from mmrt.runtime.stage_table import DEFAULT_LAYOUT, actors_of, check_layout, devices_of, processes_of
from mmrt_lab.chaos.faults import EVERYBODY, KINDS, PHASES, ZYGOTE, Cell, cells, fault_at, parse_name, targets_of


def test_a_fault_is_a_function_of_seed_and_index() -> None:
    choice = cells(KINDS, targets_of(DEFAULT_LAYOUT), PHASES)
    assert [fault_at(7, index, choice) for index in range(50)] == [fault_at(7, index, choice) for index in range(50)]
    assert [fault_at(7, index, choice) for index in range(50)] != [fault_at(8, index, choice) for index in range(50)]


def test_kinds_come_in_turn_and_each_cell_of_a_kind_before_any_again() -> None:
    choice = cells(["kill", "layout", "scale"], ["decode", "prefill", "gateway", ZYGOTE], ["idle", "mid-stream"])
    number = {kind: sum(cell.kind == kind for cell in choice) for kind in ("kill", "layout", "scale")}
    assert number == {"kill": 8, "layout": 2, "scale": 4}
    found = [fault_at(3, index, choice).cell for index in range(3 * 24)]
    assert all({cell.kind for cell in found[turn : turn + 3]} == {*number} for turn in range(0, len(found), 3))
    for kind, count in number.items():
        of_kind = [cell for cell in found if cell.kind == kind]
        assert all(len({*of_kind[turn : turn + count]}) == count for turn in range(0, len(of_kind), count))
    assert len({tuple(cell.kind for cell in found[turn : turn + 3]) for turn in range(0, len(found), 3)}) > 1, "not always in one order"
    actors = ["decode", "gateway"]
    kills, restarts = ([fault_at(3, index, cells([kind], actors, PHASES)).cell for index in range(8)] for kind in KINDS[:2])
    assert [cell.phase for cell in kills] != [cell.phase for cell in restarts], "each kind has an order of its own"


def test_cells_that_make_no_sense_are_left_out() -> None:
    choice = cells(KINDS, targets_of(DEFAULT_LAYOUT), PHASES)
    assert {cell.target for cell in choice if cell.kind == "enospc"} == {EVERYBODY}
    assert {cell.kind for cell in choice if cell.target == ZYGOTE} == {"kill", "stop", "pause", "term"}
    assert not [cell for cell in choice if cell.phase == "drain" and cell.kind in ("oom", "enospc")]
    assert {cell.target for cell in choice if cell.kind == "scale"} == {"video", "encoder", "prefill", "decode"}
    several = cells(["scale"], targets_of("8E+P+2D"), PHASES, "8E+P+2D")
    assert {cell.target for cell in several} == {"video", "prefill", "decode"}, "no ninth encoder, and each stage once"
    assert not [cell for cell in several if cell.phase == "drain"]
    assert {cell.target for cell in choice if cell.kind == "layout"} == {EVERYBODY}
    assert not cells(["layout"], ["gateway", ZYGOTE], PHASES), "no stage whose number may change"
    assert {cell.phase for cell in choice} == set(PHASES) and {cell.kind for cell in choice} == set(KINDS)


def test_pairs_are_two_different_processes() -> None:
    choice = cells(KINDS, targets_of(DEFAULT_LAYOUT), PHASES)
    faults = [fault_at(1, index, choice, pairs=0.5) for index in range(400)]
    paired = [fault for fault in faults if fault.second]
    assert 100 < len(paired) < 300 and all(fault.second != fault.cell.target for fault in paired)
    assert not [fault for fault in paired if fault.cell.phase == "drain"]
    assert "encoder.1" in {fault_at(1, index, choice, 0.5, "2E+P+D").second for index in range(400)}
    decodes = [fault_at(1, index, cells(["kill"], ["decode"], ["idle"]), 1.0, "E+P+2D").second for index in range(400)]
    assert 200 <= decodes.count("decode.1") < 300, "half of them, at least, hit the other decode"
    comes = {fault_at(1, index, cells(["scale"], ["decode"], ["idle"]), 1.0, "E+P+2D").second for index in range(100)}
    assert "decode.2" in comes, "the one that comes and goes"
    alone = [fault for fault in (fault_at(1, index, choice) for index in range(400)) if fault.second]
    assert {(fault.cell.kind, fault.cell.target) for fault in alone} <= {("stop", ZYGOTE)}  # which is found when it is needed


@pytest.mark.parametrize("layout", ["2E+2P+2D", "EPD", "EP@0+D@1", "EPD@0+EPD@1"])
def test_other_layouts_are_ones_that_a_live_run_may_have(layout: str) -> None:
    choice = cells(["layout"], targets_of(layout), ["idle"], layout)
    faults = [fault_at(1, index, choice, 0.5, layout) for index in range(50)]
    assert len({fault.layout for fault in faults}) > 1 and layout not in {fault.layout for fault in faults}
    before = processes_of(layout)
    for fault in faults:
        check_layout(fault.layout, ("0", "1"))
        after, devices = processes_of(fault.layout), {**devices_of(layout), **devices_of(fault.layout)}
        assert all(before[name] == after[name] for name in before.keys() & after.keys())
        assert all(devices[name] == device for name, device in devices_of(layout).items())
    assert any(fault.second in {*actors_of(fault.layout)} ^ {*actors_of(layout)} for fault in faults), "one that comes or goes"


def test_no_cells() -> None:
    with pytest.raises(ValueError, match="no kind of fault fits"):
        fault_at(1, 0, [])


def test_names_lead_back() -> None:
    for phase, is_drain in (("idle", False), ("drain", True)):
        fault = fault_at(5, 12, [Cell("kill", "decode", phase)])  # type: ignore[arg-type]
        assert parse_name(fault.name) == (5, is_drain, 12)


@pytest.mark.parametrize("text", ["", "5", "5:", ":5", "a:1", "1:e2", "1:-2", "1:2:3", "²:1"])
def test_bad_names(text: str) -> None:
    with pytest.raises(ValueError, match="SEED:INDEX"):
        parse_name(text)
