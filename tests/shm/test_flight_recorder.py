"""Flight recorder: the last records whole and in order, whoever dies wherever; the next writer continues."""

import itertools
import struct
import time
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from mmrt.shm.errors import MissingError, SegmentError
from mmrt.shm.flight_recorder import (
    FlightRecorder,
    FlightWriter,
    generation_of,
    kind_of,
    read_recorders,
)
from mmrt.shm.segment import Segment
from mmrt.tests.settings import examples

_names = (f"actor{number}" for number in itertools.count())
WORD = st.integers(0, 2**64 - 1)


def rows(records):
    names = ("time_ns", "duration_ns", "key", "a", "b", "c")
    return [tuple(int(record[name]) for name in names) for record in records]


class RecorderMachine(RuleBasedStateMachine):
    """Against a list of everything that was ever recorded."""

    run: ClassVar
    crashes: ClassVar

    @initialize(num_records=st.integers(2, 9))
    def create(self, num_records):
        self.name = next(_names)
        self.recorder = FlightRecorder.create(self.run, self.name, num_records)
        self.num_records = num_records
        self.generation = 1
        self.writer = self.recorder.writer(1)
        self.expected = []

    @rule(values=st.tuples(*[WORD] * 6), kind=st.integers(0, 2**16 - 1))
    def record(self, values, kind):
        self.writer.record(kind, *values)
        self.expected.append((self.generation, kind, values))

    @rule(values=st.tuples(*[WORD] * 6), steps=st.integers(0, 60))
    def record_and_die(self, values, steps):
        before = self.recorder.num_written
        with self.crashes.before_step(self.crashes.codes(FlightWriter.record), steps):
            self.writer.record(7, *values)
        assert self.recorder.num_written - before in (0, 1)
        if self.recorder.num_written > before:
            self.expected.append((self.generation, 7, values))
        self.generation += 1
        self.writer = FlightRecorder.attach(self.run, self.name).writer(self.generation)

    @invariant()
    def the_last_ones_are_there(self):
        if not hasattr(self, "recorder"):
            return
        found = FlightRecorder.attach(self.run, self.name, writable=False).read()
        expected = self.expected[-(self.num_records - 1) :]
        assert rows(found) == [values for _, _, values in expected]
        assert kind_of(found).tolist() == [kind for _, kind, _ in expected]
        assert generation_of(found).tolist() == [generation for generation, _, _ in expected]
        assert rows(self.recorder.read(2)) == [values for _, _, values in expected[-2:]]


def test_it_holds_the_last_records(run, crashes):
    RecorderMachine.run, RecorderMachine.crashes = run, crashes
    run_state_machine_as_test(RecorderMachine, settings=settings(max_examples=examples(60), stateful_step_count=25, deadline=None))
    del RecorderMachine.run


def test_a_writer_killed_anywhere_leaves_whole_records(run, crashes):
    """With a reader that looks all the time: positions without a gap, each with what belongs to it."""
    FlightRecorder.create(run, "decode", 64).close()
    reader, last = FlightRecorder.attach(run, "decode", writable=False), [0]

    def write():
        recorder = FlightRecorder.attach(run, "decode")
        writer = recorder.writer(1)
        for number in itertools.count(recorder.num_written):
            writer.record(number % 9, number, number, number, 2 * number, 3 * number, number ^ 1)

    def observe():
        found = reader.read()
        numbers = found["time_ns"].astype(np.int64)
        assert (np.diff(numbers) == 1).all()
        assert (found["mark"] == found["time_ns"] + np.uint64(1)).all()
        assert (found["a"] == 2 * found["key"]).all() and (found["b"] == 3 * found["key"]).all()
        assert (found["c"] == found["key"] ^ np.uint64(1)).all()
        if len(numbers):
            assert numbers[-1] >= last[0]
            last[0] = int(numbers[-1])

    codes = crashes.codes(write, FlightWriter.record)
    crashes.storm(lambda: crashes.victim(write, codes), observe, kills=100, enough=lambda: last[0] > 100)


def test_events_have_the_time(run):
    recorder = FlightRecorder.create(run, "decode")
    before = time.monotonic_ns()
    recorder.writer(3).event(5, 1, 2, 3, 4)
    (record,) = recorder.read()
    assert before <= record["time_ns"] <= time.monotonic_ns()
    assert (int(record["kind"]), int(record["duration_ns"])) == (3 << 16 | 5, 0)


@pytest.mark.parametrize("value", [-1, 2**64])
def test_numbers_that_do_not_fit_are_refused_and_nothing_is_written(run, value):
    recorder = FlightRecorder.create(run, "decode")
    with pytest.raises(struct.error):
        recorder.writer(1).event(5, value)
    assert recorder.num_written == 0


def test_an_overwritten_record_is_left_out(run):
    """Bytes that are not what their position says: somebody wrote where nobody may."""
    recorder = FlightRecorder.create(run, "decode", 8)
    writer = recorder.writer(1)
    for number in range(5):
        writer.event(1, number)
    words = recorder._segment.words
    words[(recorder._data + 2 * 64) // 8 + 7] = 99
    assert recorder.read()["key"].tolist() == [0, 1, 3, 4]


def test_reading_what_there_is(run):
    FlightRecorder.create(run, "decode").writer(1).event(1)
    found = read_recorders(run, ("decode", "prefill"))
    assert {name: len(records) for name, records in found.items()} == {"decode": 1}
    with pytest.raises(MissingError, match="no segment"):
        FlightRecorder.attach(run, "prefill")
    Segment.create(run.segment_path("flight-video"), 8192, kind="ring").close()
    with pytest.raises(SegmentError, match="ring"):
        FlightRecorder.attach(run, "video")
