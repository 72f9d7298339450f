"""The blocks that policies build batches of: shares of the budget, and both members of a guidance pair together."""

from typing import Any

import pytest
from msgspec.structs import replace

from mmrt.runtime.controller.scheduling.batches import EncodeBatch, PrefillBatch, in_turn, partial_first
from mmrt.runtime.controller.scheduling.legality import check
from mmrt.runtime.controller.scheduling.types import (
    ChunkChoice,
    MemberView,
    RequestView,
    SegmentChoice,
    SegmentStage,
    SegmentView,
    StepLimits,
    StepPlan,
    View,
)


def view(**values: Any) -> View:
    credit = {"encoder_credit": 1, "prefill_credit": 1, "num_embedding_pages": 64, "num_free_embedding_pages": 64}
    return View((), **credit | values)


def text(key: int, *ready: int, next: int = 0, **values: Any) -> RequestView:
    members = tuple(MemberView(next, count, count) for count in ready)
    return RequestView(key, key, has_kv=True, members=members, **values)


def media(key: int, *rows: int, **values: Any) -> RequestView:
    segments = tuple(SegmentView(0, number, SegmentStage.PREPROCESSED, count, 1, 1) for number, count in enumerate(rows))
    return RequestView(key, key, has_kv=True, segments=segments, **values)


@pytest.mark.parametrize(
    ("budget", "sizes"),
    [(30, [20, 5]), (22, [20, 2]), (16, [15, 1]), (2, [1, 1]), (1, [1])],
)
def test_both_members_of_a_pair_are_in_each_plan(budget: int, sizes: list[int]) -> None:
    """CF3. Only a budget of one token has room for one of them."""
    batch = PrefillBatch(view(), budget)
    assert batch.add(text(1, 20, 5)) == sum(sizes)
    assert [(chunk.member, chunk.end - chunk.start) for chunk in batch.chunks] == list(enumerate(sizes))


def test_a_pair_is_not_begun_by_half_at_the_end_of_a_batch() -> None:
    batch = PrefillBatch(view(), 11)
    assert batch.fill([text(1, 10), text(2, 20, 5), text(3, 7)]).chunks == (ChunkChoice(1, 0, 0, 10),)
    assert batch.is_closed, "a later request would start now, and precede the pair from then on"
    batch = PrefillBatch(view(), 20)
    assert batch.add(text(1, 20, 5), 1) == 0 and batch.add(text(2, 20), 0) == 0 and not batch.is_closed, "its share has no room"


def test_a_member_that_has_nothing_ready_does_not_hold_up_the_other() -> None:
    batch = PrefillBatch(view(), 11)
    pair = RequestView(2, 2, has_kv=True, members=(MemberView(5, 5, 9), MemberView(0, 4, 4)))
    assert batch.fill([text(1, 10), pair]).chunks == (ChunkChoice(1, 0, 0, 10), ChunkChoice(2, 1, 0, 1))


def test_a_share_of_a_batch() -> None:
    """MS3: the rest of the budget goes to others."""
    assert PrefillBatch(view(), 100).fill([text(1, 90), text(2, 30), text(3, 90)], 40).chunks == (
        ChunkChoice(1, 0, 0, 40),
        ChunkChoice(2, 0, 0, 30),
        ChunkChoice(3, 0, 0, 30),
    )
    assert [chunk.end for chunk in PrefillBatch(view(), 100).fill([text(1, 90, 90)], 40).chunks] == [39, 1], "of both members together"
    assert EncodeBatch(view(), 100).fill([media(1, 30, 30, 30), media(2, 50)], 40).segments == (
        SegmentChoice(1, 0, 0),
        SegmentChoice(2, 0, 0),
    )
    assert EncodeBatch(view(), 100).fill([media(1, 60), media(2, 20)], 40).num_rows == 80, "a segment is not split (US7)"


def test_nothing_is_planned_without_credit() -> None:
    nobody = view(encoder_credit=0, prefill_credit=0)
    assert not PrefillBatch(nobody, 10).fill([text(1, 5)]).chunks and not EncodeBatch(nobody, 10).fill([media(1, 5)]).segments
    assert not PrefillBatch(view(), 0).fill([text(1, 5)]).chunks


def test_a_full_batch_sorts_nothing() -> None:
    def requests() -> Any:
        raise AssertionError("asked for requests")
        yield

    assert not PrefillBatch(view(prefill_credit=0), 10).fill(partial_first(requests())).chunks


def test_turns_alternate_where_one_is_free() -> None:
    encode, prefill = (SegmentChoice(1, 0, 0),), (ChunkChoice(2, 0, 0, 4),)
    assert in_turn(view(last="prefill"), encode, prefill) == (encode, ())
    assert in_turn(view(last="encode"), encode, prefill) == ((), prefill)
    assert in_turn(view(last="encode"), encode, ()) == (encode, ())
    assert in_turn(view(num_turns=2), encode, prefill) == (encode, prefill)
    assert in_turn(view(encode_in_flight=1), encode, prefill) == ((), ())


PICTURES = ((10, 30), (32, 36), (40, 400))


def seeing(next: int, ready: int = 410, **values: Any) -> RequestView:
    return RequestView(1, 1, has_kv=True, members=(MemberView(next, ready, 410, pictures=PICTURES),), **values)


@pytest.mark.parametrize(
    ("next", "budget", "end"),
    [
        (0, 5, 5),
        (0, 10, 10),
        (0, 11, 10),
        (0, 29, 10),
        (0, 30, 30),
        (10, 1, 30),
        (12, 3, 30),
        (30, 3, 32),
        (31, 8, 39),
        (31, 4, 32),
        (39, 99, 40),
        (40, 99, 400),
    ],
)
def test_no_chunk_ends_within_a_picture(next: int, budget: int, end: int) -> None:
    """It ends before it or, if nothing would be left, behind it, whatever the budget."""
    batch = PrefillBatch(view(), budget)
    assert batch.add(seeing(next)) == end - next and batch.chunks == (ChunkChoice(1, 0, next, end),)
    assert batch.is_closed or end - next < budget


def test_a_picture_that_is_larger_than_the_budget_is_alone() -> None:
    batch = PrefillBatch(view(), 100)
    assert batch.fill([text(2, 50), seeing(40), text(3, 7)]).chunks == (ChunkChoice(2, 0, 0, 50),) and batch.is_closed
    batch = PrefillBatch(view(), 100)
    assert batch.fill([seeing(40), text(2, 50)]).chunks == (ChunkChoice(1, 0, 40, 400),)
    pair = RequestView(1, 1, has_kv=True, members=(MemberView(40, 410, 410, pictures=PICTURES), MemberView(0, 9, 9)))
    batch = PrefillBatch(view(), 100)
    assert batch.fill([pair]).chunks == (ChunkChoice(1, 0, 40, 400),) and batch.is_closed


def test_ends_within_pictures_are_moved_and_not_refused() -> None:
    """Of any policy."""
    requests = (seeing(0), *(replace(text(key, 60), key=key) for key in (2, 3)))
    seen, limits = view(), StepLimits(64, 64, 100)
    seen = replace(seen, requests=requests)
    for choices, expected in (
        ([(1, 0, 0, 12)], [(1, 0, 0, 10)]),
        ([(2, 0, 0, 60), (1, 0, 0, 33)], [(2, 0, 0, 60), (1, 0, 0, 32)]),
        ([(1, 0, 0, 410)], []),
    ):
        plan = StepPlan(prefill=tuple(ChunkChoice(*choice) for choice in choices))
        assert [*check(seen, limits, plan)[0].prefill] == expected
    seen = replace(seen, requests=(seeing(40), *requests[1:]))
    whole, word = ChunkChoice(1, 0, 40, 41), ChunkChoice(2, 0, 0, 60)
    assert check(seen, limits, StepPlan(prefill=(whole, word)))[0].prefill == (ChunkChoice(1, 0, 40, 400),)
    assert check(seen, limits, StepPlan(prefill=(word, whole)))[0].prefill == (word,)
    plan = StepPlan(prefill=(ChunkChoice(1, 0, 40, 400),))
    assert check(seen, limits, plan) == (plan, 0)
