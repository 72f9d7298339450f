"""The words of prefill's plans, written and read by real segments."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mmrt.shm.layer_progress import DONE, LEAST_TOKENS, LayerCounter, LayerProgress, Progress
from mmrt.shm.run_directory import RunDirectory

PLAN = (5 << 32) + 700


@pytest.fixture
def words(tmp_path: Path) -> Iterator[tuple[LayerProgress, LayerProgress]]:
    """Prefill's and decode's."""
    run = RunDirectory.create(tmp_path / "run", {})
    with closing(LayerProgress.create(run)) as ours, closing(LayerProgress.attach(run)) as theirs:
        yield ours, theirs
    run.destroy()


def test_a_word_says_who_is_how_far(words: tuple[LayerProgress, LayerProgress]) -> None:
    ours, theirs = words
    assert theirs.read(PLAN) is None
    counter = LayerCounter(ours, 3)
    counter.begin(PLAN)
    assert theirs.read(PLAN) == Progress(3, 0)
    counter.stored()
    counter.before(None)()
    paused = []
    counter.before(lambda: paused.append(theirs.read(PLAN)))()
    assert theirs.read(PLAN) == Progress(3, 3) and paused == [Progress(3, 3)], "others can copy while prefill waits for its turn"
    counter.done()
    assert theirs.read(PLAN) == Progress(3, DONE)
    LayerCounter(ours, 4).begin(PLAN)
    assert theirs.read(PLAN) == Progress(4, 0)


def test_the_last_stage_of_a_pipeline_begins_behind_the_layers_of_the_others(words: tuple[LayerProgress, LayerProgress]) -> None:
    ours, theirs = words
    counter = LayerCounter(ours, 3, first=2)
    for _ in range(2):
        counter.begin(PLAN)
        assert theirs.read(PLAN) == Progress(3, 2)
        counter.stored()
        assert theirs.read(PLAN) == Progress(3, 3)


@pytest.mark.parametrize("other", [PLAN + 256, PLAN - 256, PLAN + (1 << 32)], ids=["later", "earlier", "another controller"])
def test_a_plan_with_the_same_word_is_another(words: tuple[LayerProgress, LayerProgress], other: int) -> None:
    ours, theirs = words
    LayerCounter(ours, 1).begin(other)
    assert theirs.read(PLAN) is None and theirs.read(other) == Progress(1, 0)


def test_the_slowest_prefill_tells_the_time_of_a_token(words: tuple[LayerProgress, LayerProgress]) -> None:
    ours, theirs = words
    counter = LayerCounter(ours, 1, number=2)
    counter.begin(PLAN)
    counter.done(LEAST_TOKENS - 1)
    assert theirs.token_s == 0.0, "too few to tell"
    counter.begin(PLAN)
    counter.done(LEAST_TOKENS)
    assert 0.0 < theirs.token_s < 1.0
    counter.begin(PLAN)
    counter.done(10**12)
    assert theirs.token_s == 0.0, "tokens share a plan's time"
    part = LayerCounter(ours, 1, number=2, share=1e-9)
    part.begin(PLAN)
    part.done(LEAST_TOKENS)
    assert theirs.token_s > 1.0, "all layers take a token as much longer as they are more"
    ours.set_token_ns(2, 0)
    ours.set_token_ns(1, 5_000_000_000)
    assert theirs.token_s == 5.0
