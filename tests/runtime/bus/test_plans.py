"""What a plan says of itself: rows, pages, work."""

import pytest

from mmrt.runtime.bus.copy_plans import Load, LoadChunk, LoadPart, LoadSegments, Transfer, TransferChunk
from mmrt.runtime.bus.messages import MediaItem, PageRun
from mmrt.runtime.bus.plan_base import PlanKind
from mmrt.runtime.bus.plans import (
    Analyse,
    EmbeddingSpan,
    Encode,
    EncodePart,
    Plan,
    Prefill,
    PrefillChunk,
    PreprocessSegment,
    decode_plan,
)
from mmrt.runtime.bus.wire import encode
from mmrt.schema.media import ItemShape, SegmentShape

MEDIA = MediaItem("video", 100, path="messages[0].content[1]")
SEGMENT = SegmentShape("video", (1, 4, 4), 16, 8, 4)
SHAPE = ItemShape("video", (2, 4, 4), 8, [SEGMENT, SEGMENT])


def run(*pages: int) -> PageRun:
    return PageRun(list(pages), [7] * len(pages))


ANALYSE = Analyse(1, 5, 2, MEDIA, run(3, 4))
PREPROCESS = PreprocessSegment(1, 5, 2, 1, MEDIA, SHAPE, run(3, 4), run(8))
ENCODE = Encode([EncodePart(1, 5, SEGMENT, run(8), run(2)), EncodePart(3, 6, SEGMENT, run(9), run(4))])
SPANS = [EmbeddingSpan(4, 2, 0, run(2)), EmbeddingSpan(6, 2, 2, run(2))]
PREFILL = Prefill([PrefillChunk(1, 5, 0, 4, 10, SPANS), PrefillChunk(1, 5, 1, 0, 3, []), PrefillChunk(3, 6, 0, 0, 2, [])])
LOAD = Load([LoadChunk(1, 5, 0, 16, 48, [b"a" * 16, b"b" * 16], [5, 6]), LoadChunk(1, 5, 1, 0, 16, [b"c" * 16], [7])])
LOAD_SEGMENTS = LoadSegments(
    [LoadPart(1, 5, run(6, 7), 40, [b"d" * 16, b"e" * 16], [1, 0]), LoadPart(1, 5, run(9), 3, [b"f" * 16], [2])]
)
TRANSFER = Transfer("kv", [TransferChunk(1, 5, 0, 16, 40), TransferChunk(1, 5, 1, 0, 9)])
ALL = [ANALYSE, PREPROCESS, ENCODE, PREFILL, LOAD, LOAD_SEGMENTS, TRANSFER]


def test_stages_and_kinds() -> None:
    assert [plan.STAGE for plan in ALL] == ["video", "video", "encoder", "prefill", "prefill", "encoder", "decode"]
    assert [plan.KIND for plan in ALL] == list(PlanKind)


def test_rows_and_shares() -> None:
    assert [plan.rows for plan in ALL] == [
        [(1, 5)],
        [(1, 5)],
        [(1, 5), (3, 6)],
        [(1, 5), (1, 5), (3, 6)],
        *[[(1, 5), (1, 5)]] * 3,
    ]
    assert [plan.share(1) for plan in ALL] == [(2, 0), (2, 1), (0, 1), (4, 10), (16, 48), (0, 2), (16, 40)]
    assert PREFILL.share(3) == (0, 2) and PREFILL.share(9) == (0, 0) and ENCODE.share(9) == (0, 0)


def test_work() -> None:
    assert [plan.units for plan in ALL] == [100, 16, 32, 11, 48, 43, 33]
    assert [plan.is_large for plan in ALL] == [True, True, False, False, False, False, False]
    assert [plan.is_streamed for plan in ALL] == [False, True, False, False, False, False, False]
    assert [plan.cost is None for plan in ALL] == [True, True, False, False, True, True, True]
    assert Encode(ENCODE.parts[:1]).cost == 16 * (1 + 16 / 1024)
    assert Prefill(PREFILL.chunks[:1]).cost == 6 * (1 + 10 / 1024)


def test_pages() -> None:
    assert [plan.reads() for plan in ALL] == [{"media": [3, 4]}, {"media": [3, 4]}, {"patch": [8, 9]}, {"embedding": [2]}, {}, {}, {}]
    assert [plan.writes() for plan in ALL] == [{}, {"patch": [8]}, {"embedding": [2, 4]}, {}, {}, {"embedding": [6, 7, 9]}, {}]
    assert PREPROCESS.targets() == PREPROCESS.targets((1, 5)) == [("patch", run(8))] and PREPROCESS.targets((1, 6)) == []
    assert ENCODE.targets((3, 6)) == [("embedding", run(4))] and len(ENCODE.targets()) == 2
    assert ANALYSE.targets() == PREFILL.targets() == []


def test_what_is_left_for_rows_that_live() -> None:
    assert all(plan.only(lambda *_: True) is plan for plan in ALL)
    assert all(plan.only(lambda *_: False) is None for plan in ALL)
    assert ENCODE.only(lambda row, generation: (row, generation) == (3, 6)) == Encode(ENCODE.parts[1:])
    assert PREFILL.only(lambda row, _: row == 3) == Prefill(PREFILL.chunks[2:])
    assert ANALYSE.only(lambda row, generation: generation == 6) is None


@pytest.mark.parametrize("plan", ALL, ids=lambda plan: type(plan).__name__)
def test_renumbered(plan: Plan) -> None:
    """Pages and rows of a capture, counted from 0, of generation 1."""

    def move(_: str, source: PageRun) -> PageRun:
        return PageRun([page + 100 for page in source.pages], [1] * len(source.pages))

    moved = plan.renumbered(move, {1: 0, 3: 1}.__getitem__)
    assert {page for pages in moved.reads().values() for page in pages} == {p + 100 for pages in plan.reads().values() for p in pages}
    assert {page for pages in moved.writes().values() for page in pages} == {p + 100 for pages in plan.writes().values() for p in pages}
    assert (moved.units, moved.KIND) == (plan.units, plan.KIND) and decode_plan(encode(moved)) == moved
    if not isinstance(plan, Encode | LoadSegments):  # whose rows nobody reads
        assert {generation for _, generation in moved.rows} == {1} and min(moved.rows)[0] == 0
