"""The journal: what was appended is read back, whatever byte a crash tore it at; compaction keeps exactly what lives."""

import contextlib
import errno
import os
import random
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from mmrt.actors.controller.journal import JOURNAL_NAME, Journal, read_journal
from mmrt.runtime.bus.messages import Failed, Generation, MediaItem, RequestSpec
from mmrt.runtime.bus.wire import encode
from mmrt.runtime.controller.state.records import KEPT_ENDS, CacheEra, Ended, JournalRecord, JournalState, Refused, Submitted
from mmrt.runtime.stage_table import InstanceId
from mmrt.schema.media import MediaOptions
from mmrt.tests.settings import examples


def submitted(key: int, size: int = 3) -> Submitted:
    item = MediaItem("video", 100, "video/mp4", MediaOptions(fps=0.5, max_frames=8, use_audio_in_video=True))
    return Submitted(key, 1, key, RequestSpec(Generation(f"request-{key}"), list(range(size)), [item], None))


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


def test_a_record_of_a_later_version_costs_no_other(tmp_path: Path) -> None:
    """An edit that is undone, say: the controller that is restarted then must not lose the requests behind the record."""
    write(tmp_path, [submitted(1)])
    later = msgspec.msgpack.encode(["Later", 1])
    with (tmp_path / JOURNAL_NAME).open("ab") as file:
        file.write(struct.pack("=II", len(later), zlib.crc32(later)) + later)
    write(tmp_path, [submitted(2)])
    assert list(read(tmp_path).live) == list(read_journal(tmp_path).live) == [1, 2]


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


def test_an_append_does_not_fail_with_the_compaction_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no inodes")

    journal, _ = Journal.open(tmp_path, compact_bytes=200)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        for key in range(20):
            journal.append(submitted(key))
            journal.append(Ended(key))
    journal.append(submitted(20))
    journal.close()
    assert list(read(tmp_path).live) == [20]


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


# a file system that becomes full


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of one MiB, where this machine lets us have one."""
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def fill(directory: Path) -> None:
    with (directory / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_on_a_full_file_system_everything_accepted_comes_to_its_end(small_tmpfs: Path) -> None:
    journal, _ = Journal.open(small_tmpfs)
    for key in range(300):
        journal.append(submitted(key))
    fill(small_tmpfs)
    accepted = 300
    with pytest.raises(OSError, match="No space left"):
        while True:
            journal.append(submitted(accepted, 100))
            accepted += 1
    for key in range(accepted):
        journal.append(refused(key) if key % 3 == 0 else Ended(key))
        journal.append(Ended(key))
    journal.close()
    state = read(small_tmpfs)
    assert not state.live and len(state.ended) == accepted
    (small_tmpfs / "ballast").unlink()
    write(small_tmpfs, [submitted(5000)])
    assert list(read(small_tmpfs).live) == [5000]


def test_a_new_controller_on_a_full_file_system_can_still_note_ends(small_tmpfs: Path) -> None:
    journal, _ = Journal.open(small_tmpfs)
    journal.append(submitted(1))
    fill(small_tmpfs)
    journal.close()
    journal, state = Journal.open(small_tmpfs)
    assert list(state.live) == [1]
    with contextlib.suppress(OSError):
        journal.append(submitted(2))
    journal.append(Ended(1))
    journal.close()
    assert 1 not in read(small_tmpfs).live


# everything at once


class JournalMachine(RuleBasedStateMachine):
    """What was appended is there, whoever dies: beside a dictionary that does the same."""

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory(prefix="mmrt-test-")
        self.path = Path(self.place.name)
        self.journal, _ = Journal.open(self.path, compact_bytes=600)
        self.model = JournalState()
        self.ended: list[int] = []
        self.largest_live = 0
        self.next_key = 1

    def append(self, record: JournalRecord) -> None:
        self.journal.append(record)
        self.model.apply(record)
        if isinstance(record, Ended):
            self.ended = [key for key in self.ended if key != record.key] + [record.key]

    @rule(size=st.integers(1, 60))
    def submit(self, size: int) -> None:
        self.append(submitted(self.next_key, size))
        self.next_key += 1

    @rule(at=st.integers(0, 1000))
    @precondition(lambda self: self.model.live)
    def refuse(self, at: int) -> None:
        self.append(refused(list(self.model.live)[at % len(self.model.live)]))

    @rule(at=st.integers(0, 1000))
    @precondition(lambda self: self.model.live)
    def end(self, at: int) -> None:
        self.append(Ended(list(self.model.live)[at % len(self.model.live)]))

    @rule(number=st.integers(0, 255), size=st.integers(0, 20))
    def begin_an_era(self, number: int, size: int) -> None:
        self.append(CacheEra(bytes([number] * 16), {InstanceId(f"actor.{index}"): number for index in range(size)}))

    @rule()
    def end_somebody_unknown(self) -> None:
        self.append(Ended(self.next_key + 10**6))

    @rule(compact_bytes=st.sampled_from((100, 600, 100_000)))
    def die_and_come_again(self, compact_bytes: int) -> None:
        self.journal.close()
        self.journal, state = Journal.open(self.path, compact_bytes)
        self.same(state)

    @rule(share=st.floats(0, 1, exclude_max=True), garbage=st.binary(max_size=30))
    def die_in_an_append(self, share: float, garbage: bytes) -> None:
        """A record is half written, or the end of the file holds anything."""
        self.journal.close()
        path = self.path / JOURNAL_NAME
        whole = path.read_bytes()
        part, _ = Journal.open(self.path)
        part.append(submitted(self.next_key, 20))
        part.close()
        more = path.read_bytes()[len(whole) :]
        torn = more[: int(len(more) * share)]
        path.write_bytes(whole + (torn or garbage[:7]))
        self.journal, state = Journal.open(self.path, 600)
        self.same(state)

    @rule(seed=st.integers(0, 2**32))
    def leave_half_a_compaction(self, seed: int) -> None:
        (self.path / "journal.part").write_bytes(random.Random(seed).randbytes(100))

    def same(self, state: JournalState) -> None:
        assert state.live == self.model.live and list(state.live) == list(self.model.live)
        assert state.failures == {key: failure for key, failure in self.model.failures.items() if key in self.model.live}
        assert state.ended == self.ended[-KEPT_ENDS:]
        assert state.era == self.model.era
        assert state.next_arrival > max(self.model.live, default=-1)

    @invariant()
    def bounded(self) -> None:
        live = sum(len(encode(record)) + 8 for record in self.model.live.values())
        live += len(encode(self.model.era)) + 8
        live += sum(len(encode(Refused(key, failure))) + 8 for key, failure in self.model.failures.items()) * 40
        assert self.journal.num_bytes <= max(100_000, 2 * (live + 24 * (len(self.ended) + 1)) + 1000)

    def teardown(self) -> None:
        self.journal.close()
        self.place.cleanup()


def test_the_journal_is_what_was_appended() -> None:
    run_state_machine_as_test(JournalMachine, settings=settings(max_examples=examples(60), stateful_step_count=50, deadline=None))
