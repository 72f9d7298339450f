"""The journal: what was appended is read back, whatever byte a crash tore it at; compaction keeps exactly what lives."""

import errno
import os
import random
from pathlib import Path

import pytest

from mmrt.runtime.journal import JOURNAL_NAME, KEPT_ENDS, Ended, Journal, JournalRecord, JournalState, Refused, Submitted
from mmrt.runtime.messages import Definition, Failed, Sampling


def submitted(key: int, size: int = 3) -> Submitted:
    return Submitted(key, 1, key, Definition(f"request-{key}", list(range(size)), [], Sampling(), None))


def refused(key: int) -> Refused:
    return Refused(key, Failed(1, key, 422, "broken", "invalid_request_error"))


def read(directory: Path) -> JournalState:
    journal, state = Journal.open(directory)
    journal.close()
    return state


def write(directory: Path, records: list[JournalRecord], **options: int) -> None:
    journal, _ = Journal.open(directory, **options)
    for record in records:
        journal.append(record)
    journal.close()


def test_round_trip(tmp_path: Path) -> None:
    write(tmp_path, [submitted(1), submitted(2), refused(2), submitted(3), Ended(1)])
    state = read(tmp_path)
    assert list(state.live) == [2, 3] and state.live[3] == submitted(3)
    assert state.failures == {2: refused(2).failure}
    assert state.ended == [1] and state.next_arrival == 4
    write(tmp_path, [Ended(2), Ended(3)])
    assert read(tmp_path) == JournalState(ended=[1, 2, 3], next_arrival=4)


def test_a_torn_tail_is_cut_off_at_every_byte(tmp_path: Path) -> None:
    records: list[JournalRecord] = [submitted(1), refused(1), submitted(2)]
    write(tmp_path, records)
    path = tmp_path / JOURNAL_NAME
    whole = path.read_bytes()
    ends = []
    for count in range(len(records) + 1):
        path.unlink()
        write(tmp_path, records[:count])
        ends.append(path.stat().st_size)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        kept = max((n for n, end in enumerate(ends) if end <= size), default=0)
        expected = JournalState()
        for record in records[:kept]:
            expected.apply(record)
        assert read(tmp_path) == expected
        assert path.stat().st_size == ends[kept]
        write(tmp_path, [submitted(7)])
        assert 7 in read(tmp_path).live


def test_damage_ends_the_journal_where_it_is(tmp_path: Path) -> None:
    rng = random.Random(1)
    write(tmp_path, [submitted(1), submitted(2)])
    path = tmp_path / JOURNAL_NAME
    whole = path.read_bytes()
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        state = read(tmp_path)
        assert all(state.live[key] == submitted(key) for key in state.live) and list(state.live) in ([], [1], [1, 2])


def test_random_garbage_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / JOURNAL_NAME).write_bytes(os.urandom(1000))
    assert read(tmp_path) == JournalState()


def test_compaction_keeps_what_lives_and_bounds_the_file(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path, compact_bytes=20_000)
    expected = JournalState()
    rng = random.Random(2)
    largest = 0
    for key in range(3000):
        for record in (submitted(key, rng.randint(1, 50)), *([refused(key)] if rng.random() < 0.2 else [])):
            journal.append(record)
            expected.apply(record)
        while len(expected.live) > 20:
            ended = Ended(rng.choice(list(expected.live)))
            journal.append(ended)
            expected.apply(ended)
        largest = max(largest, journal.num_bytes)
    journal.close()
    state = read(tmp_path)
    assert state.live == expected.live and state.failures == expected.failures
    assert len(state.ended) <= KEPT_ENDS
    assert largest < 300_000 and not list(tmp_path.glob("*.part"))


def test_a_crash_before_the_rename_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    journal, _ = Journal.open(tmp_path, compact_bytes=200)
    journal.append(submitted(1))
    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        for key in range(2, 50):
            journal.append(submitted(key, 20))
            journal.append(Ended(key))
    journal.close()
    assert 1 in read(tmp_path).live


def test_a_full_file_system_adds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, _ = Journal.open(tmp_path)
    journal.append(submitted(1))
    pwrite = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if len(data) > 10:
            return pwrite(fd, data[:10], offset)
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as context:
        context.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="no space"):
            journal.append(submitted(2, 2))
    journal.append(submitted(3))
    journal.close()
    assert list(read(tmp_path).live) == [1, 3]
