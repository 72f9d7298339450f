"""Ring: FIFO, at least once, nothing lost or torn, whoever dies wherever."""

import itertools
import random
import struct
import time
import zlib
from collections import deque
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from mmrt.shm.errors import MissingError
from mmrt.shm.ring import Ring
from mmrt.shm.segment import Segment
from mmrt.tests.settings import examples
from mmrt.tests.shm.conftest import MIN_KILLS

_names = (f"r{number}" for number in itertools.count())


class RingMachine(RuleBasedStateMachine):
    """Against two queues: committed and unread, read and not acknowledged."""

    run: ClassVar
    crashes: ClassVar

    @initialize(words=st.integers(2, 12))
    def create(self, words):
        self.name = next(_names)
        self.producer = Ring.create(self.run, self.name, words * 8)
        self.consumer = Ring.attach(self.run, self.name)
        self.capacity = words * 8
        self.unread, self.unacknowledged = deque(), deque()

    def free_bytes(self):
        held = [*self.unread, *self.unacknowledged]
        return self.capacity - sum(8 + -(-len(record) // 8) * 8 for record in held)

    @rule(record=st.binary(max_size=100))
    def push(self, record):
        size = 8 + -(-len(record) // 8) * 8
        if size > self.capacity:
            with pytest.raises(ValueError, match=f"{len(record)} bytes"):
                self.producer.try_push(record)
        else:
            fits = size <= self.free_bytes()
            assert self.producer.try_push(record) == fits
            if fits:
                self.unread.append(record)

    @rule(record=st.binary(max_size=40), steps=st.integers(0, 150))
    def push_and_die(self, record, steps):
        before = self.used_bytes()
        if 8 + -(-len(record) // 8) * 8 > self.capacity:
            return
        with self.crashes.before_step(self.crashes.codes(Ring.try_push, Ring._put), steps):
            self.producer.try_push(record)
        self.restart_producer()
        if self.used_bytes() != before:
            self.unread.append(record)

    @rule(limit=st.integers(1, 5))
    def pop_all(self, limit):
        expected = [self.unread.popleft() for _ in range(min(limit, len(self.unread)))]
        self.unacknowledged.extend(expected)
        assert self.consumer.pop_all(limit) == expected

    @rule()
    def pop(self):
        expected = self.unread.popleft() if self.unread else None
        if expected is not None:
            self.unacknowledged.append(expected)
        assert self.consumer.pop() == expected

    @rule()
    def acknowledge(self):
        self.consumer.ack()
        self.unacknowledged.clear()

    @rule()
    def restart_producer(self):
        self.producer.close()
        self.producer = Ring.attach(self.run, self.name)

    @rule()
    def restart_consumer(self):
        self.consumer.close()
        self.consumer = Ring.attach(self.run, self.name)
        self.unread.extendleft(reversed(self.unacknowledged))
        self.unacknowledged.clear()

    def used_bytes(self):
        words = self.producer._segment.words
        return words[self.producer._committed] - words[self.producer._acknowledged]

    @invariant()
    def room(self):
        assert self.used_bytes() == self.capacity - self.free_bytes()

    def teardown(self):
        self.producer.close()
        self.consumer.close()


def test_ring_is_a_queue(run, crashes):
    RingMachine.run, RingMachine.crashes = run, crashes
    run_state_machine_as_test(RingMachine, settings=settings(max_examples=examples(60), stateful_step_count=40, deadline=None))


def test_every_instruction_of_a_push_can_be_the_last(run, crashes):
    """Exhaustive: the record is there whole or not at all, and the next one is right; with and without wrap-around."""
    codes = crashes.codes(Ring.try_push, Ring._put)
    outcomes = set()
    for start in (0, 40):
        for steps in itertools.count():
            ring = Ring.create(run, next(_names), 64)
            ring.try_push(bytes(start))
            ring.pop()
            ring.ack()
            with crashes.before_step(codes, steps) as crashed:
                ring.try_push(b"a record of 28 bytes ......!")
            again = Ring.attach(run, ring.name)
            assert again.try_push(b"next")
            seen = again.pop_all()
            assert seen in ([b"next"], [b"a record of 28 bytes ......!", b"next"])
            outcomes.add(len(seen))
            ring.close()
            again.close()
            if not crashed[0]:
                break
    assert outcomes == {1, 2}


def _record(index):
    body = random.Random(index).randbytes(index * 7 % 90)
    return struct.pack("=QI", index, zlib.crc32(body)) + body


def _index(record):
    index, crc = struct.unpack_from("=QI", record)
    assert zlib.crc32(record[12:]) == crc, f"record {index} is torn"
    assert record == _record(index)
    return index


def test_nothing_is_lost_when_either_end_is_killed_anywhere(run, crashes):
    """Both ends run at once and die at random lines; a new producer goes on where the ring ends, a consumer after its last ack."""
    ring = Ring.create(run, "storm", 512)
    applied = Segment.create(run.segment_path("applied"), 8192)
    word = 4096 // 8

    def produce():
        mine = Ring.attach(run, "storm")
        unacknowledged = Ring.attach(run, "storm").pop_all()
        index = _index(unacknowledged[-1]) + 1 if unacknowledged else applied.words[word]
        while True:
            if mine.try_push(_record(index)):
                index += 1
            else:
                time.sleep(0)

    def consume():
        mine = Ring.attach(run, "storm")
        batches = random.Random()
        while True:
            for record in mine.pop_all(batches.randrange(1, 9)):
                index = _index(record)
                assert index <= applied.words[word], f"record {applied.words[word]} is lost"
                if index == applied.words[word]:
                    applied.words[word] = index + 1
            mine.ack()
            time.sleep(0)

    codes = {
        produce: crashes.codes(produce, Ring.try_push, Ring._put),
        consume: crashes.codes(consume, Ring.pop_all, Ring._get, Ring.ack),
    }
    print(f"seed {crashes.seed}")
    kills, children = 0, {}
    end = time.monotonic() + crashes.storm_s
    try:
        while kills < 200 and (time.monotonic() < end or kills < MIN_KILLS):
            for body in (produce, consume):
                child, started = children.get(body, (None, 0.0))
                if child is not None and child.poll() is None:
                    if time.monotonic() - started < 0.03:
                        continue
                    child.kill()
                if child is not None:
                    assert child.status == -9, f"{body.__name__} failed (seed {crashes.seed})"
                    kills += 1
                children[body] = crashes.victim(body, codes[body]), time.monotonic()
            time.sleep(0.0002)
    finally:
        for child, _ in children.values():
            child.kill()
    last = Ring.attach(run, "storm")
    for record in last.pop_all():
        assert _index(record) <= applied.words[word]
        applied.words[word] = max(applied.words[word], _index(record) + 1)
    print(f"{applied.words[word]} records, {kills} kills")
    assert applied.words[word] > 0
    for thing in (last, ring, applied):
        thing.close()


def test_attach_to_nothing(run):
    with pytest.raises(MissingError, match="ring-nothing"):
        Ring.attach(run, "nothing")
