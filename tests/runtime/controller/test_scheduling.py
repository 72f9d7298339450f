"""Policies as functions of values: US8/US9 invariants, admission, victims, budgets; and fairness by simulation."""

from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from mmrt.runtime.bus.messages import Generation, MediaItem, RequestSpec
from mmrt.runtime.config.runtime_config import MAX_STEP_TOKENS, parse_config
from mmrt.runtime.controller.scheduling.admission import (
    Holder,
    Load,
    ResourceGate,
    check_lengths,
    check_submission,
    choose_victims,
    pages_ahead,
)
from mmrt.runtime.controller.scheduling.budgets import (
    MIN_TOKENS,
    allowance_s,
    encode_budget,
    objective_s,
    prefill_budget,
    retarget,
    search,
    steer_share,
    tbt_rule,
    update,
)
from mmrt.runtime.controller.scheduling.costs import CostModel
from mmrt.runtime.controller.scheduling.legality import check
from mmrt.runtime.controller.scheduling.policy import UNIFIED
from mmrt.runtime.controller.scheduling.types import (
    Limits,
    MemberView,
    RequestView,
    SegmentStage,
    SegmentView,
    StepLimits,
    StepPlan,
    View,
)
from mmrt.runtime.errors import RequestError
from mmrt.runtime.process.processors import Processors, plan_threads
from mmrt.tests.runtime.controller.random_views import views

LIMITS = Limits(
    num_rows=4,
    max_context=128,
    kv_page_tokens=16,
    num_kv_pages=16,
    media_page_bytes=64,
    num_media_pages=8,
    patch_page_bytes=64,
    num_patch_pages=8,
    embedding_page_tokens=32,
    num_embedding_pages=8,
    max_items=2,
    max_waiting=3,
    max_waiting_tokens=100,
)


def spec(num_tokens: int = 5, max_new: int | None = 4, media: tuple[int, ...] = (), companion: int = 0) -> RequestSpec:
    items = [MediaItem("image", size) for size in media]
    return RequestSpec(Generation("r"), [1] * num_tokens, items, max_new, companion_ids=[1] * companion or None)


@settings(deadline=None)
@given(views(), st.integers(1, 60), st.integers(1, 60))
def test_a_plan_keeps_to_budgets_credit_and_pages(view: View, tau: int, alpha: int) -> None:
    limits = StepLimits(tau, alpha)
    step, _ = UNIFIED.plan(view, limits, None)
    assert check(view, limits, step) == (step, 0)
    by_key = {request.key: request for request in view.requests}
    # prefill: US9, RS4, nothing twice
    assert sum(chunk.end - chunk.start for chunk in step.prefill) <= tau
    assert len({(chunk.key, chunk.member) for chunk in step.prefill}) == len(step.prefill), "a member was planned twice (CF3)"
    for chunk in step.prefill:
        request = by_key[chunk.key]
        member = request.members[chunk.member]
        assert request.has_kv and not request.prefill_in_flight
        assert member.next == chunk.start < chunk.end <= member.ready
    # encode: whole segments, decoded ones, in order, n_e < alpha before the last, pages
    encoded = [_segment(by_key, choice) for choice in step.encode]
    assert len(set(step.encode)) == len(step.encode)
    assert all(segment.stage == SegmentStage.PREPROCESSED for segment in encoded)
    assert sum(segment.num_rows for segment in encoded[:-1]) < alpha
    assert sum(segment.embedding_pages for segment in encoded) <= view.num_free_embedding_pages
    for choice in step.encode:
        earlier = by_key[choice.key].segments[: choice.segment]
        assert all(s.stage >= SegmentStage.ENCODING or (choice.key, s.item, s.segment) in step.encode for s in earlier)
    # video
    assert len(step.analyse) + len(step.preprocess) <= view.video_credit
    segments = [_segment(by_key, choice) for choice in step.preprocess]
    assert all(segment.stage == SegmentStage.PENDING for segment in segments)
    assert sum(segment.patch_pages for segment in segments) <= view.num_free_patch_pages
    # credit and turns
    assert not (step.encode and not view.encoder_credit) and not (step.prefill and not view.prefill_credit)
    if view.num_decoding:
        num_new = bool(step.encode) + bool(step.prefill)
        assert not num_new or view.encode_in_flight + view.prefill_in_flight + num_new <= view.num_turns
    for choices in (step.encode, step.prefill):
        keys = {choice.key for choice in choices}
        assert len(keys) == 1 or not any(by_key[key].alone for key in keys), "a suspect shares a plan"


def _segment(by_key: dict[int, RequestView], choice: tuple[int, int, int]) -> SegmentView:
    key, item, number = choice
    return next(s for s in by_key[key].segments if (s.item, s.segment) == (item, number))


def request(key: int, ready: int = 0, done: int = 0, kv: bool = True, decoded: int = 0, rows: int = 10) -> RequestView:
    segments = tuple(SegmentView(0, n, SegmentStage.PREPROCESSED, rows, 1, 1) for n in range(decoded))
    return RequestView(key, key, has_kv=kv, members=(MemberView(done, ready, ready),), segments=segments)


def plan(*requests: RequestView, tau: int = 16, alpha: int = 16, **view: object) -> StepPlan:
    values = {
        "video_credit": 2, "encoder_credit": 2, "prefill_credit": 2,
        "num_patch_pages": 8, "num_free_patch_pages": 8, "num_embedding_pages": 8, "num_free_embedding_pages": 8,
    }  # fmt: skip
    return UNIFIED.plan(View(requests, **(values | view)), StepLimits(tau, alpha), None)[0]  # type: ignore[arg-type]


def test_partial_prefills_come_first() -> None:
    """RS5, US8 (a): a request that was begun goes before an older one that was not."""
    step = plan(request(1, ready=30), request(2, ready=30, done=4))
    assert [tuple(chunk) for chunk in step.prefill] == [(2, 0, 4, 20)]


def test_what_is_left_of_the_budget_goes_to_the_next() -> None:
    step = plan(request(1, ready=6), request(2, ready=30))
    assert [tuple(chunk) for chunk in step.prefill] == [(1, 0, 0, 6), (2, 0, 0, 10)]


def test_a_request_without_kv_pages_is_passed_over_but_encoded() -> None:
    """US8 (b), (c), US9: encode proceeds when prefill is KV-blocked; the text's loop never advanced past such a request."""
    step = plan(request(1, ready=30, kv=False, decoded=1), request(2, ready=5))
    assert step.encode == ((1, 0, 0),) and [chunk.key for chunk in step.prefill] == [2]


def test_encoding_keeps_to_its_budget_but_for_a_larger_image_by_itself() -> None:
    assert len(plan(request(1, decoded=4, rows=10), alpha=19).encode) == 1
    assert len(plan(request(1, decoded=4, rows=10), alpha=20).encode) == 2
    assert len(plan(request(1, decoded=4, rows=10), alpha=1 << 20).encode) == 4
    assert len(plan(request(1, decoded=4, rows=1000), alpha=1).encode) == 1


def test_encode_and_prefill_take_turns_beside_decode() -> None:
    both = request(1, ready=10, decoded=1)
    assert plan(both).encode and plan(both).prefill
    assert plan(both, num_decoding=1, last="prefill").encode and not plan(both, num_decoding=1, last="prefill").prefill
    assert plan(both, num_decoding=1, last="encode").prefill and not plan(both, num_decoding=1, last="encode").encode
    assert not plan(both, num_decoding=1, encode_in_flight=1)


def test_with_several_actors_as_many_plans_run_beside_decode_as_the_larger_stage_has() -> None:
    both = request(1, ready=10, decoded=1)
    step = plan(both, num_decoding=1, num_turns=2)
    assert step.encode and step.prefill
    step = plan(both, num_decoding=1, num_turns=2, prefill_in_flight=1)
    assert step.encode and not step.prefill, "the last turn was prefill's"
    assert not plan(both, num_decoding=1, num_turns=2, prefill_in_flight=1, encode_in_flight=1)


def test_an_older_request_short_of_pages_keeps_younger_ones_from_them() -> None:
    pending = SegmentView(0, 0, SegmentStage.PENDING, 10, 6, 1)
    small = SegmentView(0, 0, SegmentStage.PENDING, 10, 1, 1)
    first, second = (RequestView(key, key, has_kv=True, segments=(s,)) for key, s in ((1, pending), (2, small)))
    assert not plan(first, second, num_free_patch_pages=4).preprocess
    assert plan(second, num_free_patch_pages=4).preprocess == ((2, 0, 0),)


def test_what_is_decoded_ahead_of_kv_pages_leaves_half_of_the_patch_pages() -> None:
    """Else rows that wait for KV pages would hold the patch pages for which the holder of these waits."""
    half = (SegmentView(0, 0, SegmentStage.PENDING, 10, 4, 1),)
    waiting = [RequestView(key, key, segments=half) for key in (1, 2)]
    assert plan(*waiting, RequestView(3, 3, has_kv=True, segments=half), video_credit=3).preprocess == ((1, 0, 0), (3, 0, 0))


def test_many_pictures_do_not_hold_up_an_older_video() -> None:
    """FC7: while there are items to analyse, one segment of what came before is in work; without room for it, the items go on."""
    pending, decoding = (
        SegmentView(0, number, stage, 10, 2, 1) for number, stage in enumerate((SegmentStage.PENDING, SegmentStage.PREPROCESSING))
    )
    pictures = RequestView(2, 2, unanalysed=tuple(range(16)))
    video = RequestView(1, 1, segments=(pending,))
    step = plan(video, pictures, video_credit=2)
    assert step.analyse == ((2, 0),) and step.preprocess == ((1, 0, 0),)
    assert plan(video, pictures, video_credit=1).preprocess == ((1, 0, 0),)
    step = plan(video, pictures, video_credit=2, num_free_patch_pages=1)
    assert step.analyse == ((2, 0), (2, 1)) and not step.preprocess
    begun = RequestView(1, 1, segments=(decoding, pending), video_in_flight=1)
    assert plan(begun, pictures, video_credit=1).analyse == ((2, 0),)


def test_a_suspect_is_tried_alone() -> None:
    suspect = RequestView(1, 1, has_kv=True, members=(MemberView(0, 4, 4),), alone=True)
    assert [chunk.key for chunk in plan(suspect, request(2, ready=4)).prefill] == [1]
    assert [chunk.key for chunk in plan(request(0, ready=4), suspect).prefill] == [0]


def test_nobody_younger_is_begun_before_a_suspect_that_waits() -> None:
    """What is begun goes first: while long prompts keep coming the suspect would never have its turn."""
    suspect = RequestView(1, 1, has_kv=True, members=(MemberView(0, 4, 4),), alone=True)
    assert [chunk.key for chunk in plan(suspect, request(2, ready=20, done=16), request(3, ready=30)).prefill] == [2]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 20)), min_size=1, max_size=12), st.integers(1, 32))
def test_prefill_starves_nobody(arrivals: list[tuple[int, int]], tau: int) -> None:
    """Prompts that keep coming: each is done after no more rounds than its own and all earlier tokens take."""
    targets = [size for size, _ in arrivals]
    done = [0] * len(arrivals)
    finished: dict[int, int] = {}
    for now in range(sum(targets) + len(targets) + 1):
        arrived = [key for key in range(len(targets)) if key * 2 <= now and done[key] < targets[key]]
        open_requests = [request(key, ready=targets[key], done=done[key]) for key in arrived]
        for chunk in plan(*open_requests, tau=tau).prefill:
            done[chunk.key] = chunk.end
            if chunk.end == targets[chunk.key]:
                finished[chunk.key] = now
    for key in range(len(targets)):
        rounds = -(-sum(targets[: key + 1]) // tau) + 2 * key + 2
        assert finished[key] <= rounds


# admission


@pytest.mark.parametrize(
    ("bad", "status", "words"),
    [
        (spec(0), 400, "no tokens"),
        (spec(media=(1, 1, 1)), 400, "3 media items, the limit is 2"),
        (spec(media=(64 * 9,)), 413, "576 bytes of media, the limit is 512"),
        (spec(128, None), 400, "messages: prompt is too long: 128 tokens > 127 maximum"),
        (spec(20, 109), 400, r"You requested 129 tokens \(20 in the prompt, 109 in the answer\)"),
        (spec(120, 4, companion=127), 400, "max_tokens: is 4; with the prompt it exceeds the context window"),
        (spec(127, 1, companion=127), 200, ""),
    ],
)
def test_what_can_never_run_is_refused(bad: RequestSpec, status: int, words: str) -> None:
    if status == 200:
        check_submission(bad, LIMITS, Load())
        return
    with pytest.raises(RequestError, match=words) as caught:
        check_submission(bad, LIMITS, Load())
    assert caught.value.status == status


def test_max_tokens_defaults_to_what_fits() -> None:
    assert check_lengths(spec(max_new=None), (28,), LIMITS) == 100
    assert check_lengths(spec(max_new=None), (28, 100), LIMITS) == 28
    tight = Limits(**{field: getattr(LIMITS, field) for field in LIMITS.__slots__} | {"num_kv_pages": 3})
    assert check_lengths(spec(max_new=None), (28,), tight) == 21
    with pytest.raises(RequestError, match="60 tokens > 47 maximum; .* maximum context length is 48 tokens, the whole KV cache"):
        check_lengths(spec(), (30, 30), tight)
    with pytest.raises(RequestError, match="max_tokens: is 22; .* is 48 tokens, the whole KV cache. You requested 50 tokens"):
        check_lengths(spec(max_new=22), (28,), tight)


def test_what_does_not_fit_may_be_clamped() -> None:
    wanted = msgspec.structs.replace(spec(max_new=32_000), clamp_max_new_tokens=True)
    tight = Limits(**{field: getattr(LIMITS, field) for field in LIMITS.__slots__} | {"num_kv_pages": 3})
    assert check_lengths(wanted, (28,), LIMITS) == 100 and check_lengths(wanted, (28,), tight) == 21
    assert check_lengths(msgspec.structs.replace(wanted, max_new_tokens=20), (28,), tight) == 20
    with pytest.raises(RequestError, match="128 tokens > 127 maximum"):
        check_lengths(wanted, (128,), LIMITS)


@pytest.mark.parametrize(
    "load", [Load(num_waiting=3, num_rows_used=LIMITS.num_rows, service_s=100.0), Load(num_waiting=1, num_waiting_tokens=98)]
)
def test_too_much_waiting_is_503_with_retry_after(load: Load) -> None:
    with pytest.raises(RequestError) as caught:
        check_submission(spec(), LIMITS, load)
    assert caught.value.status == 503 and caught.value.retry_after_s is not None and 1 <= caught.value.retry_after_s <= 30


def test_a_shortage_blocks_younger_requests_for_that_resource_only() -> None:
    gate = ResourceGate({"kv": 4}, rows=3, media=2)
    assert not gate.take(row=1, media=3)  # the oldest lacks media pages
    assert gate.take(row=1, kv=3)  # text passes
    assert not gate.take(row=1, media=1)  # younger media does not
    assert not gate.take(kv=2) and not gate.take(kv=1)  # kv is short now, for all that follow
    gate.charge("row", 9)
    assert not gate.take(row=1)


def test_who_is_short_of_kv_pages_keeps_the_row_that_it_could_have() -> None:
    """Else younger ones that need a row alone take it before the pages come free, for ever."""
    gate = ResourceGate({"kv": 4}, rows=1, media=1)
    assert not gate.take(row=1, kv=5) and not gate.take(row=1, media=1)
    gate = ResourceGate({"kv": 4}, rows=2, media=1)
    assert not gate.take(row=1, kv=5) and not gate.take(row=1, kv=6), "one that follows keeps none"
    assert gate.take(row=1, media=1)


def test_who_is_short_of_states_has_no_use_for_kv_pages() -> None:
    """A row gets both or none. Whoever looks is told what is short, not what is kept for the first."""
    gate = ResourceGate({"kv": 9, "state": 2}, {"kv.1": 9, "state.1": 2})
    assert not gate.take(kv=1, state=4) and not gate.has_no_kv
    for pool, need in {"kv.1": 1, "state.1": 4}.items():
        gate.block(pool, is_short=need > 2)
    assert gate.has_no_kv and gate.short == {"state", "state.1"}


page_sets = st.sets(st.integers(0, 12), min_size=1, max_size=5)
holders = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2), page_sets), unique_by=lambda h: h[0], max_size=8).map(
    lambda hs: [Holder(arrival, (arrival,), media, pages) for arrival, media, pages in hs]
)


def num_gained(all_of_them: list[Holder], chosen: list[Holder]) -> int:
    """The pages that nobody holds any more once the chosen ones are gone."""
    return len(set().union(*(h.pages for h in chosen)) - set().union(*(h.pages for h in all_of_them if h not in chosen)))


@settings(deadline=None)
@given(holders, st.integers(0, 20), st.integers(0, 12))
def test_victims_are_later_text_first_and_enough_or_none(found: list[Holder], arrival: int, need: int) -> None:
    victims = choose_victims(found, (arrival,), need, Counter(page for holder in found for page in holder.pages).__getitem__)
    chosen = [next(h for h in found if h.key == key) for key in victims]
    assert all(holder.rank > (arrival,) for holder in chosen)
    younger = [holder for holder in found if holder.rank > (arrival,)]
    if num_gained(found, younger) < need:
        assert not chosen
        return
    assert num_gained(found, chosen) >= need
    assert num_gained(found, chosen[:-1]) < max(need, 1)
    spared = [holder for holder in younger if holder not in chosen]
    for victim in chosen:
        assert not any(h.media < victim.media for h in spared), "media was taken before text"
        assert not any(h.media == victim.media and h.rank > victim.rank for h in spared), "an earlier one was taken first"


def test_pages_ahead_are_two_pages_and_two_seconds() -> None:
    assert pages_ahead(0.0, LIMITS) == 2
    assert pages_ahead(100.0, LIMITS) == -(-201 // 16)


# budgets


def test_the_model_fits_a_line() -> None:
    cost = CostModel()
    for units in (16, 64, 256, 32, 128):
        cost = cost.observe(units, 0.004 + 0.0001 * units)
    assert cost.predict(512) == pytest.approx(0.004 + 0.0512)
    assert search(cost, 0.0296, 16, 4096) in (255, 256)
    assert search(cost, 0.001, 16, 4096) == 16


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 10)), max_size=20), st.floats(0, 5))
def test_budgets_stay_in_bounds(samples: list[tuple[int, float]], allowance: float) -> None:
    for budget in (prefill_budget(0), encode_budget(0, 4)):
        for units, elapsed_s in samples:
            budget = retarget(update(budget, units, elapsed_s, allowance), allowance)
            assert budget.low <= budget.units <= budget.high


@settings(deadline=None)
@given(st.integers(1, 10_000), st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 10)), max_size=5))
def test_a_configured_budget_is_not_touched(fixed: int, samples: list[tuple[int, float]]) -> None:
    budget = prefill_budget(fixed)
    for units, elapsed_s in samples:
        budget = update(budget, units, elapsed_s, 0.01)
    assert budget.units == fixed


def test_a_budget_is_at_most_twice_the_largest_plan_seen() -> None:
    budget = prefill_budget(0)
    for units in (300, 350, 400):
        budget = update(budget, units, 0.001 + 0.000001 * units, 10.0)
    assert budget.units == 800, "beyond what was measured the line is a guess"


def test_the_search_finds_what_keeps_to_the_target() -> None:
    """A device of 0.1 ms per token and 5 ms per step, a target of 50 ms: 450 tokens; decode late, less; idle, more."""
    budget, share = prefill_budget(0), 1.0
    for _ in range(50):
        budget = update(budget, budget.units, 0.005 + 0.0001 * budget.units, allowance_s(share, 1, 0.05))
    assert 400 <= budget.units <= 450
    for _ in range(20):
        share = steer_share(share, 0.09, 0.05)
    late = retarget(budget, allowance_s(share, 1, 0.05))
    assert MIN_TOKENS <= late.units < budget.units
    for _ in range(50):
        share = steer_share(share, 0.02, 0.05)
    assert retarget(late, allowance_s(share, 1, 0.05)).units > budget.units
    idle = budget
    for _ in range(20):
        idle = update(idle, idle.units, 0.005 + 0.0001 * idle.units, allowance_s(share, 0, 0.05))
    assert 1800 <= idle.units <= MAX_STEP_TOKENS


@pytest.mark.parametrize(
    ("target_s", "factor", "least_s", "step_s", "objective"),
    [
        (0.05, 0.0, 0.0, 0.03, 0.05),  # configured, and can be met
        (0.05, 0.0, 0.0, 0.05, 0.05),
        (0.05, 0.0, 0.0, 0.18, 0.36),  # no step meets it
        (0.05, 2.0, 0.05, 0.01, 0.05),  # on a CPU
        (0.05, 2.0, 0.05, 0.18, 0.36),
        (0.05, 2.0, 0.0, 0.01, 0.02),  # on CUDA
    ],
)
def test_the_objective_is_one_that_steps_can_meet(
    target_s: float, factor: float, least_s: float, step_s: float, objective: float
) -> None:
    limits = replace(LIMITS, tbt_target_s=target_s, tbt_factor=factor, tbt_least_s=least_s)
    assert objective_s(limits, step_s) == pytest.approx(objective)


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ("", 2.5),  # 4 of 8 cores, and all of them alone
        ("[actors.decode]\nmost_threads = 4\n", 2.0),  # none are lent
        ("[actors.decode]\nmost_threads = 5\n", 2.0),
        ("[actors.decode]\nthreads = 2\nmost_threads = 8\n", 5.0),
        ('[actors]\nturns = "layers"\n', 2.0),
        ('[actors]\nturns = "layers"\n[actors.decode]\nthreads = 2\nmost_threads = 8\n', 2.0),
        ('[model]\ndevice = "cuda"\n', 2.0),
        ("[scheduling]\ntbt_target_ms = 80\n", 0.0),
    ],
)
def test_an_objective_is_longer_than_a_step_on_decodes_own_cores(settings: str, factor: float) -> None:
    """A step alone has idle cores too: on all of twice its cores it can take half as long as beside a plan."""
    assert tbt_rule(plan_threads(parse_config(settings), Processors(8, 8))).tbt_factor == factor
