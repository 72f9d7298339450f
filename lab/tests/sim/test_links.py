"""Slow links: what is chosen for pages on their way is the best choice there is, and a simulated prompt takes as long as that says."""

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.lab.tests.sim.made_costs import FREE, demo_model, make_costs, simulate_costs
from mmrt.models.config import facts_of
from mmrt_lab.sim.costs import Line
from mmrt_lab.sim.events import to_ns
from mmrt_lab.sim.links import Link, Ports, Way, fastest_way, num_begun, num_recomputed
from mmrt_lab.sim.report import Steps

SECONDS = st.floats(0.0, 10.0)
NUM_PAGES, PAGE_TOKENS, TOKEN_S = 24, 16, 0.001
PROMPT = NUM_PAGES * PAGE_TOKENS + 1  # decode feeds the last token
ONE = ("--num-requests", "1", "--concurrency", "1", "--max-tokens", "4", "--no-caches", "--layout", "EP+D", f"--input-tokens={PROMPT}")


def brute_force(num_layers: int, wait_s: float, copy_s: float, recompute_s: float) -> list[float]:
    """How long each number of recomputed layers takes."""
    copied = [wait_s + copy_s * (num_layers - count) / num_layers if count < num_layers else 0.0 for count in range(num_layers + 1)]
    return [max(copy_s, recompute_s * count / num_layers) for count, copy_s in enumerate(copied)]


@given(st.integers(1, 80), SECONDS, SECONDS, SECONDS)
def test_no_number_of_recomputed_layers_is_faster(num_layers: int, wait_s: float, copy_s: float, recompute_s: float) -> None:
    seconds = brute_force(num_layers, wait_s, copy_s, recompute_s)
    count = num_recomputed(num_layers, wait_s, copy_s, recompute_s)
    assert seconds[count] == pytest.approx(min(seconds), rel=1e-9, abs=1e-12)


def test_the_best_split_takes_as_long_as_both_rates_together() -> None:
    """L t x / (t + x), for t and x of a layer, but for the rounding to whole layers."""
    layers, t, x = 28, 0.004, 0.002
    count = num_recomputed(layers, 0.0, layers * t, layers * x)
    together = layers * t * x / (t + x)
    assert together <= max(count * x, (layers - count) * t) <= together + max(t, x)
    assert num_recomputed(layers, 0.0, 0.0, layers * x) == 0 and num_recomputed(layers, 0.0, 1e9, 0.001) == layers


@given(
    st.lists(st.builds(Way, st.integers(1, 10**6), st.floats(0, 0.01)), min_size=1, max_size=3),
    st.floats(1e6, 1e12),
    st.integers(1, 40),
    SECONDS,
    SECONDS,
)
def test_no_way_with_any_split_is_faster_than_the_fastest_way_with_its_own(
    ways: list[Way], bytes_per_s: float, num_layers: int, wait_s: float, recompute_s: float
) -> None:
    copies = [100 * way.page_s(bytes_per_s) for way in ways]
    best = min(min(brute_force(num_layers, wait_s, copy_s, recompute_s)) for copy_s in copies)
    copy_s = 100 * fastest_way(ways, bytes_per_s).page_s(bytes_per_s)
    count = num_recomputed(num_layers, wait_s, copy_s, recompute_s)
    assert brute_force(num_layers, wait_s, copy_s, recompute_s)[count] == pytest.approx(best, rel=1e-9, abs=1e-12)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.integers(1, 10**6), st.floats(0, 0.01)), max_size=30))
def test_a_device_takes_in_and_gives_out_one_transfer_at_a_time(sends: list[tuple[str, str, int, float]]) -> None:
    link = Link(bytes_per_s=1e8, latency_s=0.001)
    ports, spans = Ports(link), []
    for source, target, num_bytes, ready_s in sends:
        end_ns = ports.send(source, target, num_bytes, to_ns(ready_s))
        spans.append((source, target, end_ns - to_ns(0.001 + num_bytes / 1e8), end_ns))
        assert spans[-1][2] >= to_ns(ready_s)
    for (source, target, begin, _), (other_source, other_target, _, end) in itertools.combinations(reversed(spans), 2):
        assert begin >= end or source != other_source and target != other_target


def test_pages_that_have_begun() -> None:
    assert [num_begun(5, 0, now_ns, 1e-9) for now_ns in (0, 1, 2, 100)] == [0, 2, 3, 5]
    assert num_begun(5, 7, 8, 0.0) == 5 and num_begun(5, 7, 7, 0.0) == 0


def ttft_of(*arguments: str, link: Link | None, **changes: Any) -> tuple[float, int]:
    """Of one prompt, and the bytes that came over the link."""
    costs = make_costs(**(FREE | dict(prefill=Line(per_unit_s=TOKEN_S)) | changes))
    simulation, _ = simulate_costs(costs, *ONE, *arguments, link=link)
    (record,) = simulation.gateway.records
    ttft_s = Steps(simulation, costs).ttft_s(record)
    assert ttft_s is not None
    return ttft_s, simulation.devices.num_bytes


def ttft_here() -> float:
    """Likewise without a link, less the prompt's last token: prefill computes it here, and where there is a link decode, in no time."""
    ttft_s, num_bytes = ttft_of(link=None)
    assert num_bytes == 0
    return ttft_s - TOKEN_S


PAGE_BYTES = facts_of(demo_model(), PAGE_TOKENS).kv_page_bytes
COPY_S = 0.3  # of the prompt
LINK = {"bytes_per_s": NUM_PAGES * PAGE_BYTES / COPY_S}


NUM_LAYERS = demo_model().language.num_layers


def test_a_prompt_comes_layer_by_layer_behind_prefill() -> None:
    """KT1: of chunks of 256 and 128 tokens, which are sooner copied than computed, only the last layer of the second is left when
    prefill is done. A link that takes twice as long as prefill has begun with the first layer, and never pauses."""
    here_s = ttft_here()
    far_s, num_bytes = ttft_of(link=Link(**LINK))
    assert num_bytes == NUM_PAGES * PAGE_BYTES
    assert far_s - here_s == pytest.approx(COPY_S / 3 / NUM_LAYERS, abs=1e-4)
    far_s, _ = ttft_of(link=Link(bytes_per_s=NUM_PAGES * PAGE_BYTES / (2 * 0.384)))
    assert far_s - here_s == pytest.approx(0.256 / NUM_LAYERS + 2 * 0.384 - 0.384, abs=1e-4)


def test_pages_of_one_layer_come_chunk_by_chunk() -> None:
    """In chunks of 256 tokens the first comes while the second, of 128, is computed: that is 2/3 of the copy's 0.3 s less 0.128 s."""
    model = demo_model()
    flat = msgspec.structs.replace(model, language=msgspec.structs.replace(model.language, layers=model.language.layers[:1]))
    page_bytes = facts_of(flat, PAGE_TOKENS).kv_page_bytes
    far_s, _ = ttft_of(link=Link(bytes_per_s=NUM_PAGES * page_bytes / COPY_S), model=flat)
    assert far_s - ttft_here() == pytest.approx(COPY_S - 0.128, abs=1e-4)


@pytest.mark.parametrize("packing", ["int8", "int4"])
def test_packed_pages_take_their_share_of_the_time_where_that_is_faster(packing: Any) -> None:
    here_s = ttft_here()
    bytes_of_page = facts_of(demo_model(), PAGE_TOKENS, packing).packed_page_bytes
    far_s, num_bytes = ttft_of(link=Link(**LINK, packing=packing))
    assert num_bytes == NUM_PAGES * bytes_of_page < NUM_PAGES * PAGE_BYTES / 3
    copy_s = COPY_S * bytes_of_page / PAGE_BYTES
    assert far_s - here_s == pytest.approx(max(copy_s - 0.128, copy_s / 3), abs=1e-4)
    slow_at_it = dict(decode_context_s=COPY_S / PROMPT)
    assert ttft_of(link=Link(**LINK, packing=packing), **slow_at_it)[1] == NUM_PAGES * PAGE_BYTES


@pytest.mark.parametrize(("slower", "num_sent"), [(2, 13), (10, 3)])
def test_the_first_layers_are_computed_while_the_others_come(slower: int, num_sent: int) -> None:
    """Of the pages that have not begun to come since the first layer was stored. The slower link brings none of them."""
    here_s = ttft_here()
    link = Link(bytes_per_s=LINK["bytes_per_s"] / slower, recomputes=True)
    far_s, num_bytes = ttft_of(link=link)
    num_left, page_s, since_s = NUM_PAGES - num_sent, slower * COPY_S / NUM_PAGES, 0.384 - 0.256 / NUM_LAYERS
    seconds = brute_force(NUM_LAYERS, num_sent * page_s - since_s, num_left * page_s, num_left * PAGE_TOKENS * TOKEN_S)
    assert far_s - here_s == pytest.approx(min(seconds), abs=1e-4)
    num_recomputed = seconds.index(min(seconds))
    assert num_bytes == (num_sent + num_left * (1 - num_recomputed / NUM_LAYERS)) * PAGE_BYTES
    assert (num_recomputed == NUM_LAYERS) == (slower == 10)


def test_what_is_computed_again_slows_the_decode_of_others() -> None:
    costs = make_costs(prefill=Line(per_unit_s=TOKEN_S))
    load = ("--num-requests", "30", "--rate", "2", "--input-tokens", "200", "--max-tokens", "60", "--no-caches", "--layout", "EP+D")

    def tbt_s(link: Link) -> float:
        simulation, _ = simulate_costs(costs, *load, link=link)
        steps = Steps(simulation, costs)
        tbts = [tbt_s for record in simulation.gateway.records for tbt_s in steps.record(record).tbts_s]
        return sum(tbts) / len(tbts)

    slow = LINK["bytes_per_s"] / 10
    assert tbt_s(Link(bytes_per_s=slow, recomputes=True)) > 1.05 * tbt_s(Link(bytes_per_s=slow))
