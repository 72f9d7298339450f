"""Bugs that the simulated runs must find: a line of the rules is another one, and a run fails.

A table names seeds of runs that find each bug. When the rules change these may find nothing: then the slow search prints another seed.
If the search finds nothing either, the world has become blind.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from mmrt.tests.runtime.controller.test_recovery_world import live_through

Bug = Callable[[pytest.MonkeyPatch], None]


def must_find(
    seeds: Iterable[int],
    place: Path,
    match: str | None = None,
    *,
    has_states: bool = False,
    has_windows: bool = False,
    has_media: bool = True,
) -> None:
    """Live through one run after the other until one fails."""
    with pytest.raises((AssertionError, LookupError, ValueError), match=match) as found:
        for seed in seeds:
            kinds = {"has_states": has_states, "has_windows": has_windows, "has_media": has_media}
            live_through(seed, place, repeats_media=has_states and has_media, **kinds)
    print(f"seed {seed}: {found.value}".splitlines()[0][:160])


def name_of(bug: Bug) -> str:
    return bug.__name__
