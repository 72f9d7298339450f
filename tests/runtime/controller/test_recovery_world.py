"""Random storms over a whole simulated run: everything ends as it would have ended without them.

``MMRT_TEST_SEED`` repeats one seed, which every failure names.
"""

import random
import time
from pathlib import Path

import pytest

from mmrt.runtime.controller.scheduling.routing import Routing
from mmrt.tests.runtime.controller.recovery_world import World, make_request
from mmrt.tests.settings import examples, seeds

NUM_KNOWN, NUM_NEW = examples(20), 40
STORM_S = 6.0
ROUTINGS: dict[int, Routing] = {2: "round_robin", 6: "random"}  # of every eighth seed
TWICE = 2477  # a row has a medium twice, and keeps pages of the first until the second is ready
LOST = 336  # a row loses the pages of a segment that is read in part, and takes them again
SEVERAL_VIDEOS = ("2V+E+P+D", "3V+2E+P+2D", "2V+EP@0+D@1")
AHEAD = [2, 9, 12, 24, 33, 42]  # worlds of pipelines in which chunks follow one another closely
PIPELINES = ("E+2P+D", "2E+3P+D", "E+2P+2D")
OVER_DEVICES = ("E@0+P@0+P@1+D@1", "E@1+P@1+2P@0+D@0+D@1", "EPD@0+EPD@1")
EVENTFUL = [5, 11, 12, 15, 16, 17, TWICE, LOST]  # worlds with states in which all happens that a test counts
WINDOWED = [6, 9, 13, 15, 21, 27, 35, 36]  # likewise, with pages of windows


def survive(seed: int, place: Path, **what: bool) -> World:
    """Live through one world; an error names its seed."""
    try:
        return live_through(seed, place, **what)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error}") from error


def live_through(
    seed: int,
    place: Path,
    *,
    has_states: bool = False,
    has_windows: bool = False,
    has_media: bool = True,
    repeats_media: bool = False,
    sees_pictures: bool = False,
    several_videos: bool = False,
    first_tokens: bool = False,
    has_pipeline: bool = False,
    has_devices: bool = False,
    has_breaks: bool = False,
) -> World:
    kind = {"has_states": has_states, "has_windows": has_windows, "sees_pictures": sees_pictures, "first_tokens": first_tokens}
    kind |= {"has_pipeline": has_pipeline, "has_breaks": has_breaks}
    pipelines, routing = OVER_DEVICES if has_devices else PIPELINES, ROUTINGS.get(seed % 8, "least_load")
    layouts = SEVERAL_VIDEOS if several_videos else pipelines if has_pipeline else ()
    world = World(random.Random(seed), place, crowded=seed % 3 == 0, layouts=layouts, routing=routing, **kind)
    try:
        rng = world.random
        num_requests, end_s = rng.randint(6, 12) if world.crowded else rng.randint(1, 12), world.now + STORM_S
        for key in range(1, num_requests + 1):
            earlier = list(world.wanted.values())
            goes_on = 0.7 if has_states or has_windows else 0.3
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
    check_reach([survive(seed, place) for seed in range(NUM_KNOWN)])
    assert sum(survive(seed, place, first_tokens=True).num_first_tokens for seed in (11, 12, 15, 16)) > 2
    for seed in seeds(NUM_NEW):
        survive(seed, place, first_tokens=seed % 2 == 0)


def test_recurrent_states_survive_whatever_dies(place: Path) -> None:
    check_reach([survive(seed, place, has_states=True) for seed in EVENTFUL])
    for seed in seeds(NUM_NEW):
        survive(seed, place, has_states=True, repeats_media=True)


def test_several_videos_survive_whatever_dies(place: Path) -> None:
    for seed in (*range(NUM_KNOWN // 2), *seeds(NUM_NEW // 2)):
        survive(seed, place, several_videos=True)


def test_plans_in_breaks_of_others_survive_whatever_dies(place: Path) -> None:
    worlds = [survive(seed, place, has_breaks=True, first_tokens=seed % 2 == 0) for seed in (*EVENTFUL, *seeds(NUM_NEW))]
    assert sum(world.num_breaks for world in worlds) > len(worlds) / 2


def test_stages_of_a_pipeline_survive_whatever_dies(place: Path) -> None:
    worlds = [survive(seed, place, has_pipeline=True, first_tokens=seed % 2 == 0) for seed in AHEAD]
    for what in ("num_crashes", "num_preempted", "num_cached", "num_first_tokens"):
        assert sum(getattr(world, what) for world in worlds) >= len(worlds), what
    assert sum(world.pipeline.num_ahead for world in worlds if world.pipeline is not None) > 50
    for seed in seeds(NUM_NEW):
        survive(seed, place, has_pipeline=True, first_tokens=seed % 2 == 0)


def test_stages_of_a_pipeline_on_two_devices_survive_whatever_dies(place: Path) -> None:
    worlds = [survive(seed, place, has_pipeline=True, has_devices=True) for seed in range(NUM_KNOWN)]
    for what in ("num_crashes", "num_preempted", "num_transferred", "num_followed"):
        assert sum(getattr(world, what) for world in worlds) >= len(worlds), what
    for seed in seeds(NUM_NEW):
        survive(seed, place, has_pipeline=True, has_devices=True)


def test_pages_of_windows_survive_whatever_dies(place: Path) -> None:
    worlds = [survive(seed, place, has_windows=True) for seed in WINDOWED]
    check_reach(worlds)
    assert sum(world.num_transferred for world in worlds) > 100 and sum(world.num_loaded_windows for world in worlds) > 5
    for seed in seeds(NUM_NEW):
        survive(seed, place, has_windows=True, sees_pictures=seed % 3 == 1, first_tokens=seed % 2 == 1)


def test_pictures_that_a_chunk_must_hold_survive_whatever_dies(place: Path) -> None:
    for seed in (*EVENTFUL[:4], *seeds(NUM_NEW)):
        survive(seed, place, sees_pictures=True)


def check_reach(worlds: list[World]) -> None:
    """Worlds of known seeds, which are the same each time, reach what the storms are for."""
    for what in ("num_crashes", "num_preempted", "num_cached", "num_handed_over", "num_left"):
        assert sum(getattr(world, what) for world in worlds) >= len(worlds) // 2, what


@pytest.mark.slow
def test_everything_completes_whatever_dies_for_long(place: Path) -> None:
    first = time.time_ns() % 1_000_000_000
    for seed in range(first, first + 1920):
        survive(seed, place, has_states=seed % 4 == 0, repeats_media=seed % 8 == 0)
