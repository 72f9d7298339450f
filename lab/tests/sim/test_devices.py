"""Several devices in a simulation: what comes over the link and how long that takes, and that devices do not slow each other."""

import statistics

import pytest

from mmrt.lab.tests.sim.made_costs import demo_model, make_costs, simulate_costs
from mmrt.models.config import facts_of
from mmrt.runtime.process.memory_layout import EMBEDDING_PAGE_TOKENS
from mmrt_lab.sim.links import Link
from mmrt_lab.sim.report import Steps

ALONE = ("--num-requests", "1", "--concurrency", "1", "--max-tokens", "4", "--no-caches")
PAGE_TOKENS = 16


def ttft_s(*arguments: str, link: Link | None) -> tuple[float, int, float]:
    """Of one request, the bytes that came over the link, and how long its last plan of prefill took."""
    costs = make_costs()
    simulation, _ = simulate_costs(costs, *ALONE, *arguments, link=link)
    (record,) = simulation.gateway.records
    ttft_s = Steps(simulation, costs).ttft_s(record)
    assert ttft_s is not None and simulation.works is not None
    last = simulation.works[record.key][-1]
    assert last.step == "prefill"
    return ttft_s, simulation.devices.num_bytes, (last.end_ns - last.begin_ns) / 1e9


@pytest.mark.parametrize(("layout", "brings_image", "brings_kv"), [("EPD", 0, 0), ("EP+D", 0, 1), ("ED+P", 1, 1), ("E+PD", 1, 0)])
def test_pages_come_over_the_link_once(layout: str, brings_image: int, brings_kv: int) -> None:
    """Embeddings to prefill's device, KV pages to decode's, each transfer with the link's latency; nothing within a device."""
    load = ("--modality", "image", "--image-size", "112x112", "--input-tokens", "50", "--layout", layout)
    free_s, num_bytes, prefill_s = ttft_s(*load, link=Link())
    slow_s, again, _ = ttft_s(*load, link=Link(bytes_per_s=1e6, latency_s=0.01))
    facts = facts_of(demo_model(), PAGE_TOKENS)
    embedding, kv = EMBEDDING_PAGE_TOKENS * facts.embedding_row_bytes, facts.kv_page_bytes
    assert num_bytes == again and num_bytes >= brings_image * embedding + brings_kv * 4 * kv
    assert (num_bytes > 0) == bool(brings_image or brings_kv)
    messages_s = 0.0002 + 0.0003 + 0.0002  # of the plan's end, a tick, and the row
    before_s = (prefill_s * (1 - 1 / demo_model().language.num_layers) + messages_s) * brings_kv  # pages come with their first layer
    assert slow_s - free_s == pytest.approx(num_bytes / 1e6 + 0.01 * (brings_image + brings_kv) - before_s, abs=1e-6)
    assert ttft_s(*load, link=None)[1] == 0


def test_a_migration_is_a_part_of_the_latency() -> None:
    costs = make_costs()
    arguments = (*ALONE, "--input-tokens", "64", "--layout", "P+E+D")
    simulation, _ = simulate_costs(costs, *arguments, link=Link(latency_s=0.5))
    (record,) = simulation.gateway.records
    assert simulation.works is not None
    parts = Steps(simulation, costs).breakdown(record, simulation.works[record.key])
    assert parts.prefill_migration_s == pytest.approx(0.5 + 0.0002 + 0.0003, abs=0.001)
    assert parts.total_s == pytest.approx((record.end_ns - record.sent_ns) / 1e9)


def test_devices_do_not_slow_each_other() -> None:
    """Two whole devices serve twice the rate as one device serves the rate; sharing one, stages slow each other."""
    costs = make_costs()
    load = ("--scenario", "mixed", "--max-tokens", "30", "--no-caches", "--rows", "64")

    def means(layout: str, rate: int, link: Link | None) -> tuple[float, float]:
        arguments = (*load, "--num-requests", str(12 * rate), "--rate", str(rate), "--layout", layout)
        simulation, _ = simulate_costs(costs, *arguments, link=link)
        steps = Steps(simulation, costs)
        records = simulation.gateway.records
        tbts = [tbt_s for record in records for tbt_s in steps.record(record).tbts_s]
        return statistics.fmean(steps.ttft_s(record) or 9.0 for record in records), statistics.fmean(tbts)

    one, two, sharing = means("EPD", 10, Link()), means("2EPD", 20, Link()), means("2EPD", 20, None)
    assert two[0] == pytest.approx(one[0], rel=0.25) and two[1] == pytest.approx(one[1], rel=0.15)
    assert sharing[1] > 1.2 * two[1]


def test_rows_go_to_the_decode_with_the_fewest_sequences() -> None:
    simulation, _ = simulate_costs(make_costs(), "--num-requests", "40", "--rate", "40", "--layout", "E+P+2D", link=Link())
    firsts = [record.stretches[0][0] for record in simulation.gateway.records]
    assert 15 <= firsts.count(0) <= 25 and {*firsts} == {0, 1}
