"""Garbage is collected when few requests are under way, or at the latest after a time."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from mmrt.actors.host.garbage import FEW, LATEST_S, QUIET_S, Garbage, collect_when_quiet


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    collect_when_quiet()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


class Ring:
    def __init__(self) -> None:
        self.itself = self


def old_ring() -> "weakref.ref[Ring]":
    ring = Ring()
    gc.collect(1)  # it is old, and no automatic collection will look at it
    return weakref.ref(ring)


def test_garbage_waits_for_a_quiet_moment() -> None:
    garbage, ring = Garbage(100.0), old_ring()
    garbage.tick(101.0, 0)
    garbage.tick(100.0 + QUIET_S, FEW + 1)
    assert ring() is not None
    garbage.tick(100.0 + QUIET_S, FEW)
    assert ring() is None


def test_garbage_does_not_wait_for_ever() -> None:
    garbage, ring = Garbage(100.0), old_ring()
    garbage.tick(100.0 + LATEST_S, 1000)
    assert ring() is None


def test_young_garbage_waits_for_a_quiet_moment_too() -> None:
    """As that of a thousand requests at once: Python does not look through all of them in their midst."""
    garbage, rings = Garbage(100.0), [Ring() for _ in range(10_000)]
    first = weakref.ref(rings[0])
    del rings
    assert first() is not None and gc.get_count()[0] >= 10_000
    garbage.tick(100.0 + QUIET_S, FEW)
    assert first() is None


def test_nothing_is_collected_where_python_does() -> None:
    gc.set_threshold(700, 10, 10)
    garbage, ring = Garbage(100.0), old_ring()
    garbage.tick(100.0 + LATEST_S, 0)
    assert ring() is not None
