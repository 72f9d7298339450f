"""The machine decides what it decided when the run was recorded. ``recorded_run`` says what to do about a difference."""

import json

import pytest

from mmrt.tests.runtime.controller.recorded_run import SCENARIOS, STORED, play

STORED_RUNS = json.loads(STORED.read_text())


@pytest.mark.parametrize("name", SCENARIOS)
def test_decisions_are_as_recorded(name: str) -> None:
    stored, run = STORED_RUNS[name], play(name)
    assert stored["totals"]["finished"] > 50, "the record is of a run in which something happened"
    pairs = list(zip(stored["digests"], run.digests, strict=False))
    first = next((second for second, (before, now) in enumerate(pairs) if before != now), None)
    assert first is None, f"other effects from second {first} of {name!r} on"
    assert (run.digests, run.totals) == (stored["digests"], stored["totals"])


def test_the_record_covers_what_is_rare() -> None:
    for event in ("preempted", "evicted", "quarantined"):
        assert sum(stored["totals"][event] for stored in STORED_RUNS.values()) >= 5, event
