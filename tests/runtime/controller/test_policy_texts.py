"""The policies against their texts: examples computed by hand, and who waits for how long under a load that a policy favours."""

from typing import Any

import pytest
from msgspec.structs import replace

from mmrt.runtime.controller.scheduling.facts import Cost, Facts, Objective, RequestKind
from mmrt.runtime.controller.scheduling.monolithic import PATIENCE_S, Monolithic
from mmrt.runtime.controller.scheduling.overlap import MAX_GATHER_S, Overlap, gather_rows
from mmrt.runtime.controller.scheduling.policy import POLICIES, Policy
from mmrt.runtime.controller.scheduling.slack import IN_TIME, Slack
from mmrt.runtime.controller.scheduling.split import Split
from mmrt.runtime.controller.scheduling.stage_level import StageLevel
from mmrt.runtime.controller.scheduling.types import (
    MemberView,
    RequestView,
    SegmentStage,
    SegmentView,
    StepLimits,
    StepPlan,
    View,
)
from mmrt.runtime.controller.scheduling.weighted import Weighted
from mmrt.tests.runtime.controller.policy_load import Job, serve

PENDING, PREPROCESSING, PREPROCESSED, ENCODING = list(SegmentStage)[:4]


def request(
    key: int,
    ready: int = 0,
    target: int | None = None,
    next: int = 0,
    kind: RequestKind = "text",
    rows: tuple[int, ...] = (),
    **values: Any,
) -> RequestView:
    stage = values.pop("stage", PREPROCESSED)
    segments = tuple(SegmentView(0, number, stage, count, 1, 1) for number, count in enumerate(rows))
    members = (MemberView(next, ready, ready if target is None else target),)
    return RequestView(key, key, has_kv=True, members=members, segments=segments, kind=kind, **values)


def plan(
    policy: Policy, *requests: RequestView, limits: StepLimits, facts: Facts | None = None, memory: Any = None, **values: Any
) -> StepPlan:
    pages = {"num_patch_pages": 99, "num_free_patch_pages": 99, "num_embedding_pages": 99, "num_free_embedding_pages": 99}
    credit = {"video_credit": 0, "encoder_credit": 1, "prefill_credit": 1}
    return policy.plan(View(requests, facts or Facts(100.0), **pages | credit | values), limits, memory)[0]


def chunks(step: StepPlan) -> list[tuple[int, int, int]]:
    return [(chunk.key, chunk.start, chunk.end) for chunk in step.prefill]


def keys(step: StepPlan) -> list[int]:
    return [choice.key for choice in step.encode]


# stage_level: TI3, TI4

COSTS = Facts(100.0, encode=Cost(0.125, 1 / 4096, 9999), prefill=Cost(0.125, 1 / 8192, 9999), tbt_s=0.1875)
ALL = frozenset({"encoder", "prefill", "decode"})


@pytest.mark.parametrize(
    ("with_decode", "tokens", "rows"),
    [
        (frozenset({"decode"}), 4096, 2048),  # E, P: half of 1.25 s: 0.5 s beside the fixed cost
        (ALL, 512 - 40, 1024),  # EPD: 0.1875 s: 512 tokens, of which decode has 40; 256 rows are fewer than the least
    ],
)
def test_stage_level_searches_budgets_for_the_latency_of_the_instance(with_decode: frozenset[str], tokens: int, rows: int) -> None:
    """TI3, lines 1-9."""
    long = request(1, 9000, objective=Objective(1.25))
    limits = StepLimits(1, 1, 8000, 9000, with_decode)
    assert chunks(plan(StageLevel(), long, limits=limits, facts=COSTS, num_decode_tokens=40)) == [(1, 0, tokens)]
    many = request(1, kind="image", rows=(256,) * 9, objective=Objective(1.25))
    step = plan(StageLevel(), many, limits=limits, facts=COSTS, num_decode_tokens=40)
    assert len(step.encode) == rows // 256


def test_stage_level_takes_begun_work_then_texts_then_media() -> None:
    """TI4, lines 10-24: also a request that is encoded and not yet prefilled is running."""
    new_text = request(1, 300, arrived_s=99.0)
    encoded = request(2, 300, kind="image", arrived_s=99.5)
    begun = request(3, 400, next=100, arrived_s=99.7)
    media = request(4, 200, target=500, kind="image", rows=(64,), arrived_s=90.0)
    limits = StepLimits(1, 1, 8000, 9000, ALL)
    step = plan(StageLevel(), new_text, encoded, begun, media, limits=limits, facts=replace(COSTS, tbt_s=0.25), num_decode_tokens=124)
    assert chunks(step) == [(2, 0, 300), (3, 100, 400), (1, 0, 300)], "900 of 1024 tokens: media have none left"
    assert keys(step) == [4], "the encoder works at once (TI5)"


def test_stage_level_ranks_media_behind_the_texts_of_their_objective() -> None:
    policy, facts = StageLevel(), Facts(100.0)
    jobs = [Job(1, 10.0, "image", 5), Job(2, 13.9, "text", 5), Job(3, 14.1, "text", 5)]
    assert [job.key for job in sorted(jobs, key=lambda job: policy.rank(job, facts))] == [2, 1, 3]


# overlap: RS2-RS5

LIMITS = StepLimits(512, 2048)


def test_overlap_encodes_when_c_rows_have_gathered() -> None:
    """RS3 with C = 800: 300 and 600 rows wait, 900 go. Prefill is busy, and video brings more."""
    policy = Overlap(gather_rows=800)
    for count, keys_now in ((1, []), (2, []), (3, [1, 1, 1])):
        media = request(1, kind="image", rows=(300,) * count, video_in_flight=1)
        assert keys(plan(policy, media, limits=LIMITS, prefill_in_flight=1)) == keys_now
    small = StepLimits(512, 500)
    assert keys(plan(policy, media, limits=small, prefill_in_flight=1)) == [1], "a full plan goes, whatever C is"


def test_overlap_does_not_wait_for_what_does_not_come() -> None:
    policy, media = Overlap(gather_rows=800), request(1, kind="image", rows=(300,), video_in_flight=1)
    assert keys(plan(policy, media, limits=LIMITS)) == [1], "prefill would idle"
    assert keys(plan(policy, replace(media, video_in_flight=0), limits=LIMITS, prefill_in_flight=1)) == [1], "video brings nothing more"
    view = View((media,), Facts(100.0), encoder_credit=1, prefill_in_flight=1, num_embedding_pages=9, num_free_embedding_pages=9)
    step, memory = policy.plan(view, LIMITS, None)
    assert not step
    for waited_s, expected in ((MAX_GATHER_S - 0.01, []), (MAX_GATHER_S, [1])):
        assert keys(policy.plan(replace(view, facts=Facts(100.0 + waited_s)), LIMITS, memory)[0]) == expected


def test_overlap_gathers_until_the_fixed_cost_is_a_tenth() -> None:
    """RS11: 10 ms and 0.1 ms a row: at 900 rows 10 of 100 ms are fixed."""
    assert gather_rows(Cost(0.01, 0.0001)) == pytest.approx(900)
    assert gather_rows(Cost()) == 0


def test_overlap_prefills_what_is_ready_of_all_requests_begun_ones_first() -> None:
    """RS2, RS4, RS5: B = 512. The first image of 1 is encoded, its second not; 2 was begun."""
    first = request(1, 300, target=800, kind="image", rows=(1024,))
    step = plan(Overlap(), first, request(2, 200, next=100), request(3, 900), limits=LIMITS, num_decoding=5)
    assert chunks(step) == [(2, 100, 200), (1, 0, 300), (3, 0, 112)]
    assert keys(step) == [1], "the second is encoded beside it (RS6), also while somebody decodes"


# slack: MS2, MS3


def slack_order(now: float, *jobs: Job) -> list[int]:
    facts = Facts(now, encode=Cost(0.0, 0.01, 999), prefill=Cost(0.0, 0.001, 999))
    return [job.key for job in sorted(jobs, key=lambda job: Slack().rank(job, facts))]


def test_slack_serves_short_texts_then_the_least_slack() -> None:
    """4 s less the wait, less 10 ms a row and 1 ms a token. At 100 s: 1 has 4 - 1 - 0.74 = 2.26 s, 2 has 4 - 0.5 - 1.42 = 2.08 s,
    4 has 4 - 2 - 0.6 = 1.4 s, and 3 is a short text."""
    jobs = Job(1, 99.0, "image", 84, 1), Job(2, 99.5, "image", 108, 2), Job(3, 99.9, "text", 512), Job(4, 98.0, "text", 600)
    assert slack_order(100.0, *jobs) == [3, 4, 2, 1]
    assert slack_order(100.5, *jobs) == [3, 4, 2, 1], "all slacks fall alike"


def test_slack_counts_the_decoding_of_videos() -> None:
    """Of 4 s a decoded video has 0.64 s of encoding and 0.1 s of prefill before it. 200 rows to be decoded take 2 s beside them."""
    facts = Facts(100.0, encode=Cost(0.0, 0.01, 999), prefill=Cost(0.0, 0.001, 999), video=Cost(0.0, 0.01, 999))
    decoded, undecoded = Job(1, 100.0, "video", 84, 1), Job(2, 100.0, "video", 84, 1, undecoded_rows=200)
    assert Slack().rank(decoded, facts) == (IN_TIME, pytest.approx(103.26))
    assert Slack().rank(undecoded, facts) == (IN_TIME, pytest.approx(102.0))


def test_slack_serves_who_is_late_last_and_who_has_waited_for_long_first() -> None:
    hopeless, urgent, overdue = Job(1, 96.5, "image", 100, 1), Job(2, 97.0, "image", 100, 1), Job(3, 91.9, "image", 100, 9)
    assert slack_order(100.0, hopeless, urgent, overdue) == [3, 2, 1]
    decoding = Job(4, 90.0, "image", 100, 1, num_encoded=1, done=116)
    assert slack_order(100.0, decoding, urgent) == [4, 2], "it has had its first token: it is no victim for being late"


def test_slack_gives_one_request_half_of_a_batch_that_others_want() -> None:
    """MS3: no head-of-line blocking."""
    heavy, small = request(1, 2000, kind="image", rows=(512,) * 8), request(2, 100, kind="image", rows=(256,))
    step = plan(Slack(), heavy, small, limits=LIMITS)
    assert chunks(step) == [(1, 0, 412), (2, 0, 100)] and keys(step) == [1, 1, 1, 2]
    other = request(2, 2000, kind="image", rows=(512,) * 8)
    step = plan(Slack(), heavy, other, limits=LIMITS)
    assert chunks(step) == [(1, 0, 256), (2, 0, 256)] and keys(step) == [1, 1, 2, 2]
    step = plan(Slack(), heavy, limits=LIMITS)
    assert chunks(step) == [(1, 0, 512)] and keys(step) == [1] * 4


def test_slack_divides_the_images_of_a_request_among_encoders() -> None:
    """MS2: each image goes to the encoder with the fewest pending tokens, not all to one."""
    images = request(1, kind="image", rows=(256,) * 4)
    assert len(plan(Slack(), images, limits=LIMITS, num_encoders=2, encoder_credit=4).encode) == 2
    assert len(plan(Slack(), images, limits=LIMITS, num_encoders=2, encoder_credit=3, encode_in_flight=1).encode) == 4


# weighted: CW1-CW4, PC1, PC2

CW3 = StepLimits(8192, 8192, 8192, 8192)


def worked_example() -> tuple[RequestView, RequestView, RequestView]:
    return request(1, 2048), request(2, 50 + 1024, kind="image"), request(3, 30 + 7680, kind="video", arrived_s=99.0)


def test_weighted_solves_the_worked_example() -> None:
    """CW3: 100 decodes leave 8092 of 8192. Text and image take 3122, and the video gets the other 4970 of its 7710 tokens, where the
    text would have had to choose."""
    by_rank = sorted(reversed(worked_example()), key=lambda seen: (Weighted().rank(seen, Facts(100.0)), seen.key))  # type: ignore[arg-type]
    step = plan(Weighted(), *by_rank, limits=CW3, num_decoding=100, num_decode_tokens=100)
    assert chunks(step) == [(1, 0, 2048), (2, 0, 1074), (3, 0, 4970)]
    assert sum(end - start for _, start, end in chunks(step)) == 8192 - 100


def test_weighted_leaves_texts_their_share_beside_a_video_that_has_waited() -> None:
    """PC1, PC2: the video is first now, and would leave 382 tokens; texts have a quarter of 8092."""
    text, image, video = worked_example()
    old = replace(video, arrived_s=90.0)
    step = plan(Weighted(), old, text, image, limits=CW3, num_decoding=100, num_decode_tokens=100)
    assert chunks(step) == [(3, 0, 8092 - 2023), (1, 0, 2023)]
    step = plan(Weighted(), old, image, limits=CW3, num_decoding=100, num_decode_tokens=100)
    assert chunks(step) == [(3, 0, 7710), (2, 0, 382)], "without texts it leaves what the text says"


def test_weighted_keeps_the_order_of_priorities_and_of_age() -> None:
    """PC2 within one priority: a video that is before others has a lower priority, or has waited for a minute."""
    text, _, video = worked_example()
    assert chunks(plan(Weighted(), video, text, limits=CW3))[0] == (3, 0, 8192 - 2048)
    begun = replace(video, members=(MemberView(100, 7710, 7710),))
    assert chunks(plan(Weighted(), text, begun, limits=CW3)) == [(1, 0, 2048), (3, 100, 6244)], "it does not go first for being begun"
    assert chunks(plan(Weighted(), text, replace(begun, arrived_s=90.0), limits=CW3))[0][0] == 3, "unless it has waited"


def test_weighted_cuts_a_video_into_chunks_of_the_budget() -> None:
    """CW4: 7680 tokens are four chunks of 2048."""
    limits, starts, done = StepLimits(2048, 8192, 2048, 8192), [], 0
    while done < 7680:
        ((_, start, done),) = chunks(plan(Weighted(), request(1, 7680, next=done, kind="video"), limits=limits))
        starts.append(start)
    assert starts == [0, 2048, 4096, 6144]


def test_weighted_takes_a_budget_of_its_own() -> None:
    """CW4: the run's budget is 2048, and a plan has 4096 at most. Decode is paid first."""
    limits, long = StepLimits(2048, 8192, 4096, 8192), request(1, 7680)
    assert chunks(plan(Weighted(chunk_tokens=256), long, limits=limits, num_decoding=8, num_decode_tokens=8)) == [(1, 0, 248)]
    assert chunks(plan(Weighted(chunk_tokens=8192), long, limits=limits)) == [(1, 0, 4096)]


def test_weighted_does_not_prefill_a_video_for_the_price_of_its_text() -> None:
    """CW1 mended: of an unencoded one the text before it is prefilled, and no more."""
    video = request(3, 30, target=7710, kind="video", rows=(30720,))
    assert chunks(plan(Weighted(), video, limits=CW3)) == [(3, 0, 30)]


def test_weighted_counts_rows_where_encoder_and_prefill_share_a_device() -> None:
    """CW1: a row costs a quarter of a token here: 400 tokens are left after the text, so 1600 rows."""
    facts = Facts(100.0, encode=Cost(0, 0.0001, 99), prefill=Cost(0, 0.0004, 99))
    images = request(2, kind="image", rows=(256,) * 20)
    limits = StepLimits(1000, 1, 1000, 8192)
    assert len(plan(Weighted(), request(1, 600), images, limits=limits, facts=facts).encode) == 6
    assert len(plan(Weighted(row_weight=0.0), request(1, 600), images, limits=limits, facts=facts).encode) == 20


def test_weighted_plans_something_however_many_rows_decode() -> None:
    assert chunks(plan(Weighted(), request(1, 600), limits=StepLimits(256, 1024), num_decode_tokens=300)) == [(1, 0, 64)]


# monolithic and split: US15

WHOLE = StepLimits(2048, 8192)


def stages(*found: SegmentStage) -> tuple[SegmentView, ...]:
    return tuple(SegmentView(0, number, stage, 1024, 1, 1) for number, stage in enumerate(found))


def test_monolithic_encodes_a_request_when_all_of_it_is_decoded_and_prefills_it_when_all_is_encoded() -> None:
    video = request(1, 100, target=600, kind="video", video_since_s=99.0, video_in_flight=1)
    policy, text = Monolithic(), request(2, 5000)
    step = plan(policy, replace(video, segments=stages(PREPROCESSED, PREPROCESSING)), text, limits=WHOLE)
    assert not step.encode and chunks(step) == [(2, 0, 2048)], "the other goes on, in chunks of the budget"
    assert keys(plan(policy, replace(video, segments=stages(PREPROCESSED, PREPROCESSED)), limits=WHOLE)) == [1, 1]
    step = plan(policy, replace(video, segments=stages(ENCODING, ENCODING)), limits=WHOLE, encode_in_flight=1)
    assert not step, "its text is not prefilled beside its encoding"
    assert chunks(plan(policy, request(1, 600, kind="video"), limits=WHOLE)) == [(1, 0, 600)]


def test_monolithic_goes_on_with_a_part_where_it_would_wait_for_ever() -> None:
    """Its media exceed its share of a pool: nothing else is at work, and nothing can be."""
    policy = Monolithic()
    video = replace(request(1, 100, target=600, kind="video", video_since_s=99.0), segments=stages(PREPROCESSED, PENDING))
    assert keys(plan(policy, video, limits=WHOLE)) == [1]
    encoded = replace(video, segments=stages(PENDING))
    assert chunks(plan(policy, encoded, limits=WHOLE)) == [(1, 0, 100)]
    assert not plan(policy, video, limits=WHOLE, encode_in_flight=1), "somebody may give pages back"
    waiting = replace(video, video_since_s=100.0 - PATIENCE_S, video_in_flight=1)
    assert keys(plan(policy, waiting, limits=WHOLE)) == [1], "video does nothing for it"


def test_monolithic_goes_on_with_a_part_whose_own_pages_keep_it_from_the_rest() -> None:
    """However much others have to do: with seed 1063 of the recovery world two requests took each other's pages for ever."""
    policy, busy = Monolithic(), {"video_credit": 0, "encode_in_flight": 1, "num_patch_pages": 8, "num_embedding_pages": 8}
    video = replace(request(1, 100, target=600, kind="video", video_since_s=99.0), segments=stages(PREPROCESSED, PENDING))
    assert not plan(policy, replace(video, patch_held=3), limits=WHOLE, **busy)
    assert keys(plan(policy, replace(video, patch_held=4), limits=WHOLE, **busy)) == [1]
    encoded = replace(video, segments=stages(PREPROCESSED), embedding_held=3)
    assert not plan(policy, encoded, limits=WHOLE, encoder_credit=0, **busy)
    encoded = replace(encoded, embedding_held=4)
    assert chunks(plan(policy, encoded, limits=WHOLE, encoder_credit=0, **busy)) == [(1, 0, 100)]


def test_split_takes_turns_whether_or_not_somebody_decodes() -> None:
    both = request(1, 5000, kind="image", rows=(1024,)), request(2, 100)
    assert plan(Split(), *both, limits=WHOLE, last="prefill") == StepPlan(encode=plan(Split(), *both, limits=WHOLE).encode)
    assert chunks(plan(Split(), *both, limits=WHOLE, last="encode")) == [(1, 0, 2048)]
    assert not plan(Split(), *both, limits=WHOLE, prefill_in_flight=1)


# nobody starves


@pytest.mark.parametrize("name", POLICIES)
def test_texts_that_keep_coming_do_not_starve_a_video(name: str) -> None:
    """Texts ask for 1.5 times what can be served, from before the video comes until after it must be done. It waits for what came
    before it, for its objective twice at most, and for what came meanwhile: 1.5 s of work a second."""
    texts = [Job(number, 0.1 * number, "text", 96) for number in range(300)]
    video = Job(1000, 1.0, "video", 10, num_segments=8)
    serve(POLICIES[name], [*texts, video], 30.0)
    assert video.wait_s <= 1.5 * (1.0 + 2 * video.ttft_s) + 4.0


@pytest.mark.parametrize("name", POLICIES)
def test_videos_that_keep_coming_do_not_starve_a_text(name: str) -> None:
    videos = [Job(number, 0.5 * number, "video", 200, num_segments=12) for number in range(80)]
    text = Job(1000, 1.0, "text", 60)
    serve(POLICIES[name], [*videos, text], 40.0)
    assert text.wait_s <= 1.5 * (1.0 + 2 * text.ttft_s) + 4.0


def test_weighted_bounds_the_wait_of_texts_in_a_flood_of_video() -> None:
    """PC1, PC2: twice as much video as can be served. A text waits for the plan in work, for its turn beside the encoder, and for its
    own chunks; videos are done one after the other."""
    videos = [Job(number, 0.25 * number, "video", 30, num_segments=10) for number in range(120)]
    texts = [Job(1000 + number, 0.05 + 0.9 * number, "text", 40) for number in range(30)]
    serve(POLICIES["weighted"], [*videos, *texts], 30.0)
    assert max(text.wait_s for text in texts) <= 1.0
    done = [video for video in videos if video.first_token_s is not None]
    assert len(done) >= 28 and done == videos[: len(done)], "in order: none starves"


@pytest.mark.parametrize("name", ["slack", "weighted"])
def test_texts_do_not_wait_for_media_that_came_before(name: str) -> None:
    """What these policies are for: first come, first served keeps a text waiting for all of them."""

    def wait_s(policy: Policy) -> float:
        videos = [Job(number, 0.0, "video", 400, num_segments=8) for number in range(6)]
        text = Job(100, 0.3, "text", 60)
        serve(policy, [*videos, text], 60.0, num_decoding=0)
        return text.wait_s

    assert wait_s(POLICIES[name]) <= 1.0 < 3.0 <= wait_s(POLICIES["unified"])
