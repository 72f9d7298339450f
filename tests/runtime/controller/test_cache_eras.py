"""The era in which later runs with the same files begin."""

import pytest

from mmrt.runtime.bus import messages as m
from mmrt.runtime.controller.machine import Controller
from mmrt.runtime.controller.recovery import RunSnapshot, recover
from mmrt.runtime.controller.state.effects import Effect, KeepEra, WriteJournal
from mmrt.runtime.controller.state.records import CacheEra, JournalState
from mmrt.runtime.stage_table import InstanceId
from mmrt.tests.runtime.controller.test_machine import limits

ERA = bytes(range(16))


def run(kept_era: bytes = b"", journaled: CacheEra | None = None) -> Controller:
    """The first controller of a run, or a later one."""
    journal = JournalState() if journaled is None else JournalState(era=journaled)
    return recover(limits(), 3, RunSnapshot(journal, [], [0, 0], [], {}, {}, kept_era=kept_era))


def clear(machine: Controller) -> list[Effect]:
    return machine.on_message(InstanceId("cache"), 1, m.ClearCaches(), 100.0)


def hello(machine: Controller, code: int, generation: int = 1) -> list[Effect]:
    return machine.on_message(InstanceId("encoder"), generation, m.Hello("encoder", generation, 1, True, code), 100.0)


def kept(effects: list[Effect]) -> list[bytes]:
    return [effect.era for effect in effects if isinstance(effect, KeepEra)]


def journaled(effects: list[Effect]) -> CacheEra:
    (record,) = [effect.record for effect in effects if isinstance(effect, WriteJournal)]
    assert isinstance(record, CacheEra)
    return record


@pytest.mark.parametrize("before", [b"", ERA])
def test_the_next_run_finds_what_was_saved_after_a_clear_and_not_what_was_before(before: bytes) -> None:
    machine = run(before)
    hello(machine, 5)
    assert machine.state.era == before
    (era,) = kept(clear(machine))
    assert era == machine.state.era != before and run(era).state.era == era


def test_what_edited_code_fills_is_found_by_no_later_run() -> None:
    machine = run(ERA)
    hello(machine, 5)
    effects = hello(machine, 6, generation=2)
    assert kept(effects) == [] and machine.state.era not in (b"", ERA)
    (era,) = kept(clear(machine))
    assert era not in (b"", ERA, machine.state.era), "the next run does not find what was cleared, nor what this one fills"


def test_a_controller_that_dies_before_the_era_is_kept() -> None:
    machine = run(ERA)
    hello(machine, 5)
    record = journaled(clear(machine))
    again = run(ERA, record)
    assert again.state.era == record.era != ERA and kept(again.tick(200.0)) == [record.era]
    assert kept(run(record.era, record).tick(200.0)) == []


def test_a_run_whose_caches_were_never_cleared_keeps_nothing() -> None:
    machine = run()
    record = journaled(hello(machine, 5))
    assert record.era == b"" and kept(run(b"", record).tick(200.0)) == []
