"""Which models are loaded: single decisions, and random days of a front in which nobody waits for ever."""

import math
import os
import time
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mmrt.serving.residency import Decision, Residence, Rules, State, decide, fits
from mmrt.serving.runs import ModelRun
from mmrt.shm.controller_stats import ControllerStats, StatsSnapshot
from mmrt.shm.file_lock import EXCLUSIVE, open_lock, try_lock
from mmrt.shm.run_directory import RunDirectory

RULES = Rules(budget_bytes=10, idle_s=60.0, turn_s=5.0)


def absent(name: str, needs: int | None = 6, **more: Any) -> Residence:
    return Residence(name=name, needs_bytes=needs, **more)


def ready(name: str, needs: int = 6, **more: Any) -> Residence:
    return Residence(name=name, needs_bytes=needs, state=State.READY, **{"last_used_s": 100.0, "ready_since_s": 50.0, **more})


def test_what_is_asked_for_is_started_if_there_is_memory() -> None:
    assert decide([absent("a", waiting_since_s=1.0), absent("b")], RULES, 100) == Decision(start=("a",))
    assert decide([absent("a", None, waiting_since_s=1.0)], RULES, 100) == Decision(), "nobody knows what it needs"
    assert decide([absent("a", waiting_since_s=1.0, retry_s=101.0)], RULES, 100) == Decision(), "it has just failed"
    assert decide([absent("a", waiting_since_s=1.0), ready("b", 4)], RULES, 100).start == ("a",)
    two = [absent("a", 5, waiting_since_s=2.0), absent("b", 5, waiting_since_s=1.0)]
    assert decide(two, RULES, 100).start == ("b", "a"), "in the order of waiting"


def test_the_idle_model_used_longest_ago_gives_way_and_no_more_than_needed() -> None:
    idle = [ready("old", 3, last_used_s=90.0), ready("new", 3, last_used_s=99.0), ready("pinned", 4, pinned=True, last_used_s=1.0)]
    assert decide([absent("a", 3, waiting_since_s=99.0), *idle], RULES, 100) == Decision(drain=("old",))
    assert decide([absent("a", 6, waiting_since_s=99.0), *idle], RULES, 100) == Decision(drain=("old", "new"))
    assert decide([absent("a", 7, waiting_since_s=99.0), *idle], RULES, 100) == Decision(), "it does not fit beside what is pinned"
    draining = Residence(name="gone", needs_bytes=6, state=State.DRAINING)
    assert decide([absent("a", 6, waiting_since_s=99.0), draining, ready("b", 4)], RULES, 100) == Decision(), "memory is on its way"


def test_what_is_done_without_clients_is_no_idle_time() -> None:
    works = ready("b", ready_since_s=98.0, last_used_s=1.0, num_unattended=1)
    assert decide([works], RULES, 100) == Decision()
    assert decide([absent("a", waiting_since_s=99.0), works], RULES, 100) == Decision()


def test_a_lull_between_two_requests_is_no_idle_time() -> None:
    wanted, lull = absent("a", waiting_since_s=99.0), ready("b", ready_since_s=98.0, last_used_s=100.0)
    assert decide([wanted, lull], RULES, 100.9) == Decision()
    assert decide([wanted, lull], RULES, 101) == Decision(drain=("b",))


def test_a_busy_model_has_its_turn_first() -> None:
    busy = ready("b", num_running=1, ready_since_s=97.0)
    assert decide([absent("a", waiting_since_s=90.0), busy], RULES, 101.9) == Decision()
    assert decide([absent("a", waiting_since_s=90.0), busy], RULES, 102) == Decision(drain=("b",))
    assert decide([absent("a", waiting_since_s=99.0), busy], RULES, 102) == Decision(), "it has not been waited for so long"
    loading = Residence(name="b", needs_bytes=6, state=State.LOADING)
    assert decide([absent("a", waiting_since_s=0.0), loading], RULES, 100) == Decision(), "it will be ready, and then have a turn"


def test_pinned_models_that_do_not_fit_together_keep_nobody_out() -> None:
    first, second = ready("first", 6, pinned=True), absent("second", 6, pinned=True, waiting_since_s=0.0)
    other = absent("other", 4, waiting_since_s=1.0)
    assert fits(first, [first, second, other], 10) and not fits(second, [first, second, other], 10)
    assert decide([first, second, other], RULES, 100) == Decision(start=("other",))


def test_what_becomes_free_is_for_who_has_waited_longest() -> None:
    small = absent("small", 3, waiting_since_s=99.0)
    assert decide([absent("a", 8, waiting_since_s=98.0), small, ready("b", num_running=1)], RULES, 100) == Decision()


def test_idle_models_end_after_a_time() -> None:
    assert decide([ready("a")], RULES, 159) == Decision()
    assert decide([ready("a")], RULES, 160) == Decision(drain=("a",))
    for stays in (ready("a", pinned=True), ready("a", num_running=1), ready("a", waiting_since_s=1.0), ready("a", keep_s=math.inf)):
        assert decide([stays], RULES, 10_000) == Decision()
    assert decide([ready("a")], Rules(budget_bytes=10, idle_s=0.0, turn_s=5.0), 10_000) == Decision(), "0: never"
    assert decide([ready("a", keep_s=0.0)], RULES, 100) == Decision(drain=("a",))
    assert decide([ready("a", keep_s=70.0)], RULES, 165) == Decision()


EVENTS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["ask", "ask", "end", "loaded", "failed", "gone", "die"]), st.floats(0, 4)),
    max_size=120,
)


@given(st.lists(st.tuples(st.integers(1, 10), st.booleans()), min_size=4, max_size=4), EVENTS)
def test_on_no_day_is_memory_overcommitted_or_anybody_forgotten(
    kinds: list[tuple[int, bool]], events: list[tuple[int, str, float]]
) -> None:
    """``ask`` begins to wait for a model; a model that is ready takes who waits; ``end`` ends a request."""
    models = [absent(str(at), needs, pinned=pinned and at == 0) for at, (needs, pinned) in enumerate(kinds)]
    now_s = 0.0

    def step() -> None:
        decision = decide(models, RULES, now_s)
        for model in models:
            if model.name in decision.start:
                assert model.state is State.ABSENT and model.waiting_since_s is not None
                model.state = State.LOADING
            if model.name in decision.drain:
                assert model.state is State.READY and not model.pinned
                model.state = State.DRAINING
            if model.state is State.READY and model.waiting_since_s is not None:
                model.num_running, model.waiting_since_s = model.num_running + 1, None
        assert sum(model.needs_bytes or 0 for model in models if model.is_held) <= RULES.budget_bytes

    def happen(model: Residence, event: str) -> None:
        if event == "ask" and model.waiting_since_s is None:
            model.waiting_since_s = now_s
        elif event == "end" and model.num_running:
            model.num_running, model.last_used_s = model.num_running - 1, now_s
        elif event == "loaded" and model.state is State.LOADING:
            model.state, model.ready_since_s, model.last_used_s = State.READY, now_s, now_s
        elif event == "failed" and model.state is State.LOADING:
            model.state, model.retry_s = State.ABSENT, now_s + 60
        elif event == "die" and model.state is State.READY:
            model.state, model.num_running = State.ABSENT, 0
        elif event == "gone" and model.state is State.DRAINING and not model.num_running:
            model.state = State.ABSENT

    for at, event, pause_s in events:
        now_s += pause_s
        happen(models[at], event)
        step()
    for _ in range(60):  # then all that begins ends, and who has waited is served
        now_s += 5
        for model in models:
            for event in ("end", "loaded", "gone"):
                happen(model, event)
        step()
    waiting = [model for model in models if model.waiting_since_s is not None]
    assert all(not fits(model, models, RULES.budget_bytes) for model in waiting), waiting


def test_a_run_tells_how_many_requests_it_works_on(tmp_path: Path) -> None:
    model_run = ModelRun.__new__(ModelRun)
    model_run.path = tmp_path / "run"
    assert model_run.num_requests() == 0, "there is none"
    with RunDirectory.create(model_run.path, {}) as run:
        assert model_run.num_requests() == 0, "its memory is not there yet"
        ControllerStats.create(run).publish(StatsSnapshot(waiting=1, preparing=2, running=3))
        assert model_run.num_requests() == 6
    lock = open_lock(model_run.path / "LOCK", create=True)
    try:
        assert try_lock(lock, EXCLUSIVE)
        before_s = time.monotonic()
        assert model_run.num_requests() == 0, "its directory is being cleared"
        assert time.monotonic() - before_s < 2.0, "the front's loop is not held up"
    finally:
        os.close(lock)
