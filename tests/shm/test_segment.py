"""Segments: whole or not there, a clear error where space is short, and no trace of a view that outlives its segment."""

import errno
import gc
import os
import subprocess

import numpy as np
import pytest

from mmrt.shm import segment as segment_module
from mmrt.shm.errors import MissingError, SegmentError, SpaceError
from mmrt.shm.pool import PagePool
from mmrt.shm.segment import HEADER_BYTES, Layout, Segment
from mmrt.shm.sequence_table import SequenceTable

SIZE = HEADER_BYTES + 4096


@pytest.fixture
def tiny(place):
    """A tmpfs of one megabyte, where mounting is allowed."""
    target = place / "tiny"
    target.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", target], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        yield target
    finally:
        subprocess.run(["umount", target], check=True)


def test_two_mappings_share_their_bytes(place):
    with Segment.create(place / "s", SIZE, kind="test", geometry=(3, 4)) as one, Segment.attach(place / "s", kind="test") as two:
        one.words[600] = 2**64 - 1
        one.array(HEADER_BYTES, (2, 3), np.int32)[1, 2] = -7
        assert two.words[600] == 2**64 - 1
        assert two.array(HEADER_BYTES, (2, 3), np.int32)[1, 2] == -7
        assert two.geometry == (3, 4, 0, 0, 0, 0, 0, 0)
        assert (place / "s").stat().st_mode & 0o777 == 0o600


def test_read_only_mapping_cannot_be_written(place):
    with Segment.create(place / "s", SIZE), Segment.attach(place / "s", writable=False) as reader:
        with pytest.raises(TypeError):
            reader.words[600] = 1
        with pytest.raises(ValueError, match="read-only"):
            reader.array(HEADER_BYTES, 1, np.uint8)[0] = 1


def test_a_name_is_given_once(place):
    with Segment.create(place / "s", SIZE) as first:
        first.words[600] = 5
        with pytest.raises(FileExistsError):
            Segment.create(place / "s", SIZE)
        with Segment.attach(place / "s") as again:
            assert again.words[600] == 5


def test_unpublished_segment_has_no_name(place):
    segment = Segment.create(place / "s", SIZE, publish=False)
    segment.words[600] = 9
    assert os.listdir(place) == []
    segment.publish()
    segment.close()
    with Segment.attach(place / "s") as again:
        assert again.words[600] == 9
    Segment.create(place / "t", SIZE, publish=False).close()
    assert os.listdir(place) == ["s"]


def test_what_is_not_the_segment_is_refused(place):
    with pytest.raises(MissingError, match="'s'"):
        Segment.attach(place / "s")
    Segment.create(place / "s", SIZE, kind="pool").close()
    with pytest.raises(SegmentError, match="pool.*not.*ring"):
        Segment.attach(place / "s", kind="ring")
    (place / "short").write_bytes(b"mmrt")
    with pytest.raises(SegmentError, match="4 bytes"):
        Segment.attach(place / "short")


def test_truncated_pool_is_refused_rather_than_a_bus_error(run):
    PagePool.create(run, "p", 8, 4096).close()
    os.truncate(run.segment_path("pool-p"), 16384)
    with pytest.raises(SegmentError, match="16384 bytes"):
        PagePool.attach(run, "p")


def test_views_may_outlive_the_segment(place):
    segment = Segment.create(place / "s", SIZE)
    view = segment.array(HEADER_BYTES, 4, np.uint8)
    segment.close()
    segment.close()
    view[:] = 3
    assert view.sum() == 12
    with pytest.raises(ValueError, match="released"):
        segment.words[0]


def test_no_descriptor_and_no_mapping_is_left(run):
    def held():
        gc.collect()
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("/run/" in line for line in maps)

    before = held()
    for number in range(20):
        pool = PagePool.create(run, f"p{number}", 2, 64)
        view = pool.gather_rows([0], 8, 2)
        table = SequenceTable.create(run, 2, 8, 2)
        pool.close()
        table.close()
        for name in ("sequences", "logprobs", "vectors"):
            run.segment_path(name).unlink()
        del view
    assert held() == before


def test_fields_of_a_layout_share_no_line():
    layout = Layout()
    fields = [layout.add(3, np.uint8), layout.add((2, 5), np.uint64), layout.add(1, np.uint8, align=4096), layout.add(1, np.uint8)]
    assert [field.offset for field in fields] == [4096, 4160, 8192, 8256]
    assert layout.num_bytes == 8320


def test_a_creator_killed_anywhere_leaves_nothing_or_everything(place, crashes):
    found = set()

    def create():
        with Segment.create(place / "s", SIZE + (1 << 20), kind="test", geometry=(7,)) as segment:
            segment.array(HEADER_BYTES, 16, np.uint8)[:] = 1

    def observe():
        names = os.listdir(place)
        assert names in ([], ["s"])
        if names:
            with Segment.attach(place / "s", kind="test") as segment:
                assert segment.geometry[0] == 7

    def spawn():
        found.add(tuple(os.listdir(place)))
        (place / "s").unlink(missing_ok=True)
        return crashes.victim(create, crashes.codes(Segment.create, Segment.publish, Segment.__init__, create))

    crashes.storm(spawn, observe, kills=25, enough=lambda: len(found) == 2)
    assert found == {(), ("s",)}
    (place / "s").unlink(missing_ok=True)


def test_more_than_is_available_is_a_clear_error(place):
    space = os.statvfs(place)
    needed = (space.f_bavail + space.f_blocks + 1) * space.f_frsize
    with pytest.raises(SpaceError, match=rf"segment 'big' needs {needed} bytes, but .* has \d+ available") as caught:
        Segment.create(place / "big", needed)
    assert caught.value.needed == needed > caught.value.available
    assert os.listdir(place) == []


def test_a_pool_that_does_not_fit_names_itself(run):
    with pytest.raises(SpaceError, match=r"pool-kv\.") as caught:
        PagePool.create(run, "kv", 1 << 30, 1 << 24)
    assert caught.value.needed > 1 << 54
    assert sorted(os.listdir(run.path)) == ["LOCK", "notes", "run.json"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_space_that_goes_away_meanwhile(place, monkeypatch, code):
    def fail(fd, offset, size):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(segment_module.os, "posix_fallocate", fail)
    with pytest.raises(SpaceError):
        Segment.create(place / "s", SIZE)
    assert os.listdir(place) == []


def test_full_tmpfs(tiny):
    """Real ENOSPC: an error, no bus error, and the space is free again."""
    space = os.statvfs(tiny).f_bavail
    with pytest.raises(SpaceError, match="available"):
        Segment.create(tiny / "s", 2 << 20)
    with Segment.create(tiny / "a", 700 << 10) as first:
        first.array(HEADER_BYTES, first.num_bytes - HEADER_BYTES, np.uint8)[:] = 1
        with pytest.raises(SpaceError, match="'b'") as caught:
            Segment.create(tiny / "b", 400 << 10)
        assert caught.value.available <= 324 << 10
    assert os.listdir(tiny) == ["a"]
    (tiny / "a").unlink()
    assert os.statvfs(tiny).f_bavail == space


def test_full_tmpfs_that_does_not_say_so(tiny, monkeypatch):
    plenty = os.statvfs("/")
    monkeypatch.setattr(segment_module.os, "fstatvfs", lambda fd: plenty)
    with pytest.raises(SpaceError):
        Segment.create(tiny / "s", 2 << 20)
    assert os.listdir(tiny) == []
