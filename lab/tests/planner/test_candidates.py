"""The space of layouts, and Algorithm 2 on traces whose division is known."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.bench.serve.slo import Slo
from mmrt.lab.tests.sim.made_costs import make_costs
from mmrt.runtime.autoscale.demand import Demand
from mmrt.runtime.stage_table import check_layout, processes_of
from mmrt_lab.planner.candidates import METHODS, candidates, colocated, divided
from mmrt_lab.planner.heuristic import Memory, capacity, check_objective, divide, partition
from mmrt_lab.sim.costs import Line

ROOMY = Memory(free_bytes=0, token_bytes=1.0, num_rows=64)


@pytest.mark.parametrize("num_devices", range(3, 9))
def test_the_space_is_the_texts(num_devices: int) -> None:
    """2 C(N-1, 1) + C(N-1, 2) layouts, 35 for 8 devices, each of all devices and each one that a run can have (TI10)."""
    layouts = candidates(num_devices)
    assert len(layouts) == len({*layouts}) == 2 * (num_devices - 1) + math.comb(num_devices - 1, 2)
    for layout in (*layouts, colocated(num_devices)):
        check_layout(layout)
        computing = [name for name in processes_of(layout) if name.partition(".")[0] in ("encoder", "prefill", "decode")]
        assert len(computing) == num_devices
    assert len(candidates(8)) == 35 and colocated(8) == "8EPD"


@pytest.mark.parametrize("num_devices", [-1, 0, 2, 9])
def test_other_numbers_of_devices_are_refused(num_devices: int) -> None:
    with pytest.raises(ValueError, match=f"^{num_devices} devices: the planner divides 3 to 8"):
        candidates(num_devices)


@given(st.integers(3, 8), st.lists(st.floats(0, 1e6), min_size=3, max_size=3))
def test_a_partition_gives_every_stage_a_device_and_all_of_them_away(num_devices: int, seconds: list[float]) -> None:
    shares = partition(num_devices, dict(zip("EPD", seconds, strict=True)))
    assert sum(shares.values()) == num_devices and min(shares.values()) >= 1
    for method in METHODS:
        assert divided(method, shares) in candidates(num_devices)


def test_a_partition_follows_the_ratio() -> None:
    assert partition(8, {"E": 1.0, "P": 3.0, "D": 4.0}) == {"E": 1, "P": 3, "D": 4}
    assert partition(8, {"E": 0.01, "P": 6.9, "D": 1.09}) == {"E": 1, "P": 6, "D": 1}


def made_demand(**changes: float) -> Demand:
    values = {"num_requests": 100, "encode_rows": 100 * 400, "prompt_tokens": 100 * 300, "decode_tokens": 100 * 50}
    return Demand(**{**values, **changes})  # type: ignore[arg-type]


def test_algorithm_2_divides_by_the_time_of_each_stage() -> None:
    """Costs without fixed parts: t = W / tp does not depend on the budgets, and is what the lines say."""
    costs = make_costs(
        encode={"image": Line(per_unit_s=1e-4)}, prefill=Line(per_unit_s=4e-4), decode=Line(per_unit_s=3.2e-3), decode_context_s=0.0
    )
    division = divide(8, made_demand(), costs, Slo(4.0, 0.1), ROOMY)
    assert division.seconds == pytest.approx({"E": 4.0, "P": 12.0, "D": 16.0})
    assert division.shares == {"E": 1, "P": 3, "D": 4} and division.layouts == ["E+3P+4D", "4EP+4D", "5ED+3P"]
    assert division.budgets == {"E": 4 * 4096, "P": 4096, "D": 31}  # at most mmrt's largest plan; within 0.1 s
    assert capacity("E+3P+4D", made_demand(), division.seconds) == pytest.approx(25.0)
    assert capacity("8EPD", made_demand(), division.seconds) == pytest.approx(25.0)
    assert capacity("4EP+4D", made_demand(), division.seconds) == pytest.approx(25.0)
    assert capacity("7EP+D", made_demand(), division.seconds) == pytest.approx(100 / 16)


def test_a_batch_of_decode_fits_the_memory() -> None:
    """Line 9, mended: 0.9 of the free bytes, by the bytes of a token, by the tokens of a request."""
    costs = make_costs(decode=Line(fixed_s=0.01), decode_context_s=0.0)
    tight = Memory(free_bytes=350_000_000, token_bytes=100_000, num_rows=64)
    division = divide(8, made_demand(), costs, Slo(4.0, 0.1), tight)
    assert division.budgets["D"] == int(0.9 * 350_000_000 / 100_000 / 350) == 9
    assert divide(8, made_demand(), costs, Slo(4.0, 0.1), ROOMY).budgets["D"] == 64
    assert division.seconds["D"] == pytest.approx(5000 / 9 * 0.01)


def test_text_alone_needs_no_encoder_but_gets_one() -> None:
    division = divide(8, made_demand(encode_rows=0), make_costs(), Slo(4.0, 0.1), ROOMY)
    assert division.seconds["E"] == 0 and division.shares["E"] == 1


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        (Slo(0.001, 1.0), "no layout meets a TTFT of 0.001 s: a request"),
        (Slo(9.0, 0.002), "no layout meets a TBT of 0.002 s"),
    ],
)
def test_an_objective_that_no_layout_meets_is_refused(slo: Slo, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_objective(made_demand(), make_costs(), slo)


def test_demands_are_plain_data() -> None:
    assert msgspec.json.decode(msgspec.json.encode(made_demand()), type=Demand) == made_demand()
