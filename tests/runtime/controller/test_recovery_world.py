"""Random storms over a whole simulated run: everything ends as it would have ended without them.

``MMRT_TEST_SEED`` repeats one seed, which every failure names.
"""

import os
import random
import time
from pathlib import Path

import pytest

from mmrt.tests.runtime.controller.recovery_world import World, make_request
from mmrt.tests.settings import examples

NUM_KNOWN, NUM_NEW = examples(20), examples(40)
STORM_S = 6.0
TWICE = 2477  # a row has a medium twice, and keeps pages of the first until the second is ready
LOST = 336  # a row loses the pages of a segment that is read in part, and takes them again


def live_through(seed: int, place: Path, *, has_states: bool = False, has_media: bool = True, repeats_media: bool = False) -> World:
    world = World(random.Random(seed), place, crowded=seed % 3 == 0, has_states=has_states)
    try:
        rng = world.random
        num_requests, end_s = rng.randint(6, 12) if world.crowded else rng.randint(1, 12), world.now + STORM_S
        for key in range(1, num_requests + 1):
            earlier = list(world.wanted.values())
            goes_on = 0.7 if has_states else 0.3
            world.submit(
                make_request(
                    rng, key, world.now, world.crowded, earlier, has_media=has_media, goes_on=goes_on, repeats_media=repeats_media
                )
            )
            for _ in range(rng.choice((0, 3, 20))):
                world.turn()
        while world.now < end_s and not world.is_idle():
            world.turn()
        world.calm_down()
    finally:
        world.close()
    return world


def test_everything_completes_whatever_dies(place: Path) -> None:
    if chosen := os.environ.get("MMRT_TEST_SEED"):
        seeds = [int(chosen)]
    else:
        first = time.time_ns() % 1_000_000_000
        seeds = [*range(NUM_KNOWN), *range(first, first + NUM_NEW)]
    finished = crashes = preempted = evicted = cached = handed_over = left = 0
    for seed in seeds:
        try:
            world = live_through(seed, place)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        finished += sum(outcome == "finished" for outcome in world.outcomes.values())
        crashes += world.num_crashes
        preempted += world.num_preempted
        evicted += world.num_evicted
        cached += world.num_cached
        handed_over += world.num_handed_over
        left += world.num_left
    assert finished >= len(seeds) and cached >= len(seeds) and min(handed_over, left) >= len(seeds) // 3 or chosen
    print(f"{finished} requests finished over {crashes} crashes, {preempted} preemptions, {evicted} evictions, {cached} cached tokens")
    print(f"{handed_over} rows went from one decode to another, {left} actors left")


def test_recurrent_states_survive_whatever_dies(place: Path) -> None:
    first = int(os.environ.get("MMRT_TEST_SEED") or time.time_ns() % 1_000_000_000)
    preempted = handed_over = cached = 0
    known, new = [*range(examples(10)), TWICE, LOST], range(first, first + NUM_NEW)
    for seed in [*known, *new]:
        try:
            world = live_through(seed, place, has_states=True, repeats_media=seed in new)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        preempted += world.num_preempted
        handed_over += world.num_handed_over
        cached += world.num_cached
    assert cached >= NUM_NEW and preempted >= NUM_NEW // 4 and handed_over >= NUM_NEW // 4


@pytest.mark.slow
def test_everything_completes_whatever_dies_for_long(place: Path) -> None:
    first = time.time_ns() % 1_000_000_000
    for seed in range(first, first + 1920):
        try:
            live_through(seed, place, has_states=seed % 4 == 0, repeats_media=seed % 8 == 0)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
