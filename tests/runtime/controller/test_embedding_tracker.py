"""Embedding tracker against a per-token model (RS2, RS4)."""

import hypothesis.strategies as st
from hypothesis import given, settings

from mmrt.runtime.bus.messages import PageRun
from mmrt.runtime.controller.state.embedding_tracker import EmbeddingTracker, Part, lay_out
from mmrt.schema.media import ItemShape, SegmentShape

PAGE = 4


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[ItemShape], int]:
    """(starts, shapes, tokens of the prompt)."""
    starts, shapes, position = [], [], 0
    for _ in range(draw(st.integers(0, 3))):
        position += draw(st.integers(0, 4))
        segments = [SegmentShape("image", (1, 1, 1), n, 4, n) for n in draw(st.lists(st.integers(1, 10), min_size=1, max_size=3))]
        starts.append(position)
        shapes.append(ItemShape("image", (1, 1, 1), sum(s.num_tokens for s in segments), segments))
        position += shapes[-1].num_tokens
    return starts, shapes, position + draw(st.integers(1, 5))


@settings(deadline=None)
@given(prompts(), st.data())
def test_ready_prefix_is_that_of_the_tokens(prompt: tuple[list[int], list[ItemShape], int], data: st.DataObject) -> None:
    starts, shapes, length = prompt
    parts = lay_out(starts, shapes)
    tracker = EmbeddingTracker(parts, PAGE)
    ready = [True] * length
    for part in parts:
        ready[part.start : part.end] = [False] * part.num_tokens
    for _ in range(data.draw(st.integers(0, 8))):
        if not parts:
            break
        part = data.draw(st.sampled_from(parts))
        state = data.draw(st.booleans())
        (tracker.mark_ready if state else tracker.mark_unready)(part.item, part.segment)
        ready[part.start : part.end] = [state] * part.num_tokens
    target = data.draw(st.integers(0, length - 1))
    prefix = ready.index(False) if False in ready else length
    assert tracker.ready_prefix(target) == min(prefix, target)


def test_pictures_that_a_chunk_must_hold() -> None:
    """Those that are ready and not prefilled whole; sounds see nothing behind them."""
    segments = [SegmentShape(kind, (1, 1, 1), 6, 4, 6, lead=(1, 1), trail=(2,)) for kind in ("image", "audio", "image")]  # type: ignore[arg-type]
    tracker = EmbeddingTracker(lay_out([5], [ItemShape("image", (1, 1, 1), 27, segments)]), PAGE)
    assert tracker.pictures(0, 40) == tracker.pictures(12, 31) == ((7, 13), (25, 31))
    assert tracker.pictures(13, 31) == ((25, 31),) and tracker.pictures(0, 30) == ((7, 13),) and tracker.pictures(31, 40) == ()


@settings(deadline=None)
@given(prompts(), st.data())
def test_chunks_take_every_row_once_and_pages_go_when_used_up(
    prompt: tuple[list[int], list[ItemShape], int], data: st.DataObject
) -> None:
    starts, shapes, length = prompt
    parts = lay_out(starts, shapes)
    tracker = EmbeddingTracker(parts, PAGE)
    runs = {}
    for index, part in enumerate(parts):
        count = -(-part.num_tokens // PAGE)
        runs[part.item, part.segment] = PageRun([100 * index + page for page in range(count)], [1] * count)
    taken: dict[tuple[int, int], list[tuple[int, int]]] = {place: [] for place in runs}
    position = 0
    while position < length:
        end = min(length, position + data.draw(st.integers(1, 9)))
        for part in tracker.overlapping(position, end):
            run = runs[part.item, part.segment]
            gone = tracker.num_consumed_pages(part, position)
            span = tracker.span(part, run, position, end)
            assert not set(span.source.pages) & set(run.pages[:gone]), "a chunk names a page that was given back"
            assert max(position, part.start) == span.start and len(span.source.pages) == len(span.source.generations)
            for row in range(span.first_row, span.first_row + span.num_tokens):
                taken[part.item, part.segment].append((span.source.pages[row // PAGE], row % PAGE))
        position = end
    for part in parts:
        run = runs[part.item, part.segment]
        assert taken[part.item, part.segment] == [(run.pages[row // PAGE], row % PAGE) for row in range(part.num_tokens)]
        assert tracker.num_consumed_pages(part, part.start) == 0
        assert tracker.num_consumed_pages(part, length) == len(run.pages)


def test_pages_that_wait_for_the_grid() -> None:
    """Chunks end at multiples of 16: rows behind the last one before a segment are needed until it is ready."""
    parts = [Part(0, 0, 3, 10), Part(1, 0, 14, 3), Part(2, 0, 18, 9), Part(3, 0, 40, 2)]
    tracker, plain = EmbeddingTracker(parts, 4, grid=16), EmbeddingTracker(parts, 4)
    assert [tracker.num_kept_pages(item, 0) for item in range(4)] == [0, 3, 1, 0]
    assert [plain.num_kept_pages(item, 0) for item in range(4)] == [0, 0, 0, 0]
    for item, ready in enumerate((0, 0, 16, 32)):
        assert tracker.ready_prefix(50) == ready
        tracker.mark_ready(item, 0)
    assert tracker.ready_prefix(50) == 50
