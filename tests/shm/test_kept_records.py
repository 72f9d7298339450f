"""Records that outlive their writer: what a head counts is whole, whenever the writer is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mmrt.shm import kept_records
from mmrt.shm.kept_records import MAX_BODY_BYTES, MAX_HEAD_BYTES, NUM_RECORDS, KeptRecords
from mmrt.shm.workplace import Workplace

WRITER = """
import itertools, sys
from mmrt.shm.kept_records import KeptRecords
records = KeptRecords(int(sys.argv[1]))
for turn in itertools.count(1):
    number = turn % 3
    body = bytes([turn % 251]) * (turn % 9000)
    if number in records.used():
        records.clear(number)
    records.write_body(number, body)
    records.commit(number, b"%d 0" % turn)
    for piece in range(1, 20):
        records.write_log(number, piece - 1, bytes([turn % 251]))
        records.commit(number, b"%d %d" % (turn, piece))
"""


@contextmanager
def made() -> Iterator[tuple[int, KeptRecords]]:
    descriptor = KeptRecords.create()
    try:
        yield descriptor, KeptRecords(descriptor)
    finally:
        os.close(descriptor)


def test_the_next_process_finds_all_of_it() -> None:
    with made() as (descriptor, records):
        assert records.free() == 0 and list(records.used()) == []
        records.write_body(0, b"body")
        records.write_log(0, 0, b"ab")
        records.write_log(0, 2, b"cd")
        records.commit(0, b"first")
        records.commit(0, b"second")
        records.write_body(1, bytes(100_000))  # without a head
        again = KeptRecords(descriptor)
        assert list(again.used()) == [0] and again.free() == 1
        assert (again.head(0), again.body(0, 4), again.log(0, 1, 4)) == (b"second", b"body", b"bcd")


def test_the_next_process_finds_where_it_was_worked_on() -> None:
    def places(records: KeptRecords, number: int) -> list[bool]:
        return [records.is_at_work(number, place) for place in Workplace]

    with made() as (descriptor, records):
        for number in range(2):
            records.commit(number, b"head")
        records.set_at_work(0, Workplace.THREAD, True)
        records.set_at_work(1, Workplace.LOOP, True)
        records.commit(0, b"later")
        again = KeptRecords(descriptor)
        assert (places(again, 0), places(again, 1), again.head(0)) == ([False, True], [True, False], b"later")
        records.set_at_work(1, Workplace.LOOP, False)
        records.clear(0)
        again = KeptRecords(descriptor)
        assert places(again, 0) == places(again, 1) == [False, False] and list(again.used()) == [1]


def test_memory_is_given_back() -> None:
    def used() -> int:
        return os.fstat(descriptor).st_blocks * 512

    with made() as (descriptor, records):
        records.commit(0, b"x")
        before = used()
        records.write_body(7, bytes(1 << 20))
        records.write_log(7, 0, bytes(1 << 20))
        records.commit(7, b"x")
        assert used() >= before + (2 << 20)
        records.clear(7)
        assert used() == before
        records.write_body(NUM_RECORDS - 1, bytes(1 << 20))  # by a process that was killed before it had a head
        KeptRecords(descriptor)
        assert used() == before


def test_whole_after_each_kill(subtests: pytest.Subtests) -> None:
    """A writer is killed again and again, wherever it is: what the head says is there, of one turn alone."""
    with made() as (descriptor, _):
        for number in range(10):
            with subtests.test(number=number):
                process = subprocess.Popen([sys.executable, "-c", WRITER, str(descriptor)], pass_fds=[descriptor])
                deadline = time.monotonic() + 20
                while (
                    not any(os.pread(descriptor, 8, 2 * 8)) and time.monotonic() < deadline
                ):  # its word; to open them gives memory back
                    time.sleep(0.01)
                time.sleep(0.003 * number)
                process.send_signal(signal.SIGKILL)
                process.wait(10)
                records = KeptRecords(descriptor)
                assert len(list(records.used())) >= 2
                for one in records.used():
                    turn, num_log = map(int, records.head(one).split())
                    assert records.body(one, turn % 9000) == bytes([turn % 251]) * (turn % 9000)
                    assert records.log(one, 0, num_log) == bytes([turn % 251]) * num_log
                    records.clear(one)


def test_what_is_too_long_changes_nothing() -> None:
    with made() as (_, records):
        records.commit(0, b"x")
        with pytest.raises(ValueError, match=f"head of {MAX_HEAD_BYTES + 1} bytes, the limit is {MAX_HEAD_BYTES}"):
            records.commit(0, bytes(MAX_HEAD_BYTES + 1))
        with pytest.raises(ValueError, match="log of .* bytes, the limit is"):
            records.write_log(0, MAX_BODY_BYTES, b"x")
        with pytest.raises(ValueError, match=f"kept record {NUM_RECORDS} of {NUM_RECORDS}"):
            records.write_body(NUM_RECORDS, b"")
        assert records.head(0) == b"x"


def test_a_file_of_another_size_is_refused() -> None:
    descriptor = os.memfd_create("other")
    with pytest.raises(ValueError, match="kept records of 0 bytes"):
        kept_records.KeptRecords(descriptor)
    os.close(descriptor)
