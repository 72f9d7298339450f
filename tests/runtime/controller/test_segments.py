"""A segment goes from stage to stage by methods that refuse any other way."""

from collections.abc import Callable

import pytest

from mmrt.runtime.bus.messages import PageRun
from mmrt.runtime.controller.scheduling.types import SegmentStage
from mmrt.runtime.controller.state.row_record import SegmentRecord

PATCH, EMBEDDING = PageRun([1], [1]), PageRun([1], [1])  # equal numbers in two pools are not the same pages
STEPS: list[Callable[[SegmentRecord], object]] = [
    lambda segment: segment.begin_preprocess(PATCH),
    lambda segment: segment.preprocessed(),
    lambda segment: segment.begin_encode(EMBEDDING),
    lambda segment: segment.encoded(),
    lambda segment: segment.consumed(),
]


def at(stage: int) -> SegmentRecord:
    segment = SegmentRecord()
    for step in STEPS[:stage]:
        step(segment)
    return segment


def test_the_way_forward() -> None:
    assert [at(stage).stage for stage in range(5)] == list(SegmentStage)
    assert [at(stage).target for stage in range(5)] == [None, ("patch", PATCH), None, ("embedding", EMBEDDING), None]
    assert at(4) == SegmentRecord(SegmentStage.ENCODED, None, EMBEDDING) and at(5).embedding is None


def test_ways_back() -> None:
    first, second = at(1), at(3)
    assert first.give_back() == ("patch", PATCH) and first == SegmentRecord()
    assert second.give_back() == ("embedding", EMBEDDING) and second == at(2)
    for stage in range(6):
        (segment := at(stage)).reset()
        assert segment == SegmentRecord()


@pytest.mark.parametrize("stage", range(5))
def test_no_other_way(stage: int) -> None:
    for number, step in enumerate(STEPS):
        if number != stage:
            with pytest.raises(AssertionError):
                step(at(stage))
    if stage not in (1, 3):
        with pytest.raises(AssertionError):
            at(stage).give_back()
