"""Plan table: a plan is there whole or not at all, and never another one in its place."""

import itertools
import random
import zlib
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from mmrt.shm.plan_table import PlanRecord, PlanTable
from mmrt.tests.settings import examples

SLOTS, BYTES = 4, 64


class PlanMachine(RuleBasedStateMachine):
    """Against a dict of slots; ``write_and_die`` stops a write before any instruction."""

    run: ClassVar
    crashes: ClassVar

    @initialize()
    def create(self):
        self.run.segment_path("plans").unlink(missing_ok=True)
        self.table = PlanTable.create(self.run, SLOTS, BYTES)
        self.reader = PlanTable.attach(self.run, writable=False)
        self.ids = itertools.count(1)
        self.live = {}
        self.past = []

    @rule(slot=st.integers(0, SLOTS - 1), actor=st.integers(0, 7), payload=st.binary(max_size=BYTES + 2))
    def write(self, slot, actor, payload):
        plan_id = next(self.ids)
        if len(payload) > BYTES:
            with pytest.raises(ValueError, match=f"{len(payload)} bytes exceeds a slot's {BYTES}"):
                self.table.write(slot, plan_id, actor, payload)
            return
        self.table.write(slot, plan_id, actor, payload)
        self.live[slot] = PlanRecord(slot, plan_id, actor, payload)
        self.past.append(self.live[slot])

    @rule(slot=st.integers(0, SLOTS - 1), payload=st.binary(max_size=BYTES), steps=st.integers(0, 140))
    def write_and_die(self, slot, payload, steps):
        new = PlanRecord(slot, next(self.ids), 1, payload)
        old = self.live.pop(slot, None)
        with self.crashes.before_step(self.crashes.codes(PlanTable.write), steps):
            self.table.write(*new)
        self.table.close()
        self.table = PlanTable.attach(self.run)
        found = [record for record in self.table.live() if record.slot == slot]
        assert found in ([], [old], [new])
        self.past.append(new)
        if found:
            self.live[slot] = found[0]

    @rule(slot=st.integers(0, SLOTS - 1))
    def clear(self, slot):
        self.table.clear(slot)
        self.live.pop(slot, None)

    @invariant()
    def reads(self):
        assert self.reader.live() == [self.live[slot] for slot in sorted(self.live)]
        for record in self.past:
            expected = record.payload if self.live.get(record.slot) == record else None
            assert self.reader.read(record.slot, record.plan_id) == expected

    def teardown(self):
        self.table.close()
        self.reader.close()


def test_plan_table_is_its_slots(run, crashes):
    PlanMachine.run, PlanMachine.crashes = run, crashes
    run_state_machine_as_test(PlanMachine, settings=settings(max_examples=examples(40), stateful_step_count=25, deadline=None))


def test_a_corrupt_payload_is_no_plan(run):
    table = PlanTable.create(run, SLOTS, BYTES)
    table.write(2, 9, 1, b"payload")
    raw = table._segment.buf
    at = bytes(raw).index(b"payload")
    raw[at] ^= 1
    assert table.read(2, 9) is None
    assert table.live() == []
    table.close()


def test_slots_have_limits(run):
    table = PlanTable.create(run, SLOTS, BYTES)
    for slot in (-1, SLOTS):
        with pytest.raises(ValueError, match=rf"slot {slot} .*\(4 slots\)"):
            table.read(slot, 1)
    table.close()


def _payload(plan_id):
    return random.Random(plan_id).randbytes(plan_id * 37 % 900)


def test_a_controller_killed_anywhere_leaves_no_torn_plan(run, crashes):
    table = PlanTable.create(run, SLOTS, 1024)
    seen = set()

    def control():
        mine = PlanTable.attach(run)
        last = max((record.plan_id for record in mine.live()), default=max(seen, default=0))
        for plan_id in itertools.count(last + 1000):
            mine.write(plan_id % SLOTS, plan_id, zlib.crc32(b"%d" % plan_id) % 8, _payload(plan_id))
            if plan_id % 7 == 0:
                mine.clear(plan_id % SLOTS)

    def observe():
        for slot, plan_id, actor, payload in table.live():
            assert plan_id % SLOTS == slot
            assert actor == zlib.crc32(b"%d" % plan_id) % 8
            assert payload == _payload(plan_id)
            seen.add(plan_id)

    codes = crashes.codes(control, PlanTable.write, PlanTable.clear, PlanTable._start)
    crashes.storm(lambda: crashes.victim(control, codes), observe, kills=70, enough=lambda: len(seen) > 10)
    table.close()
