"""Digests of weights: by contents, read once, and read again whenever a file may have changed."""

import os
import time
from pathlib import Path

import msgspec
import pytest

from mmrt.actors import weights_digest
from mmrt.actors.weights_digest import NAME, weights_digests

MIB = 1 << 20


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(weights_digest, "SETTLED_S", -60.0)  # files of this moment are kept too
    (tmp_path / "cache").mkdir(mode=0o700)
    return tmp_path / "cache"


def put(path: Path, data: bytes, like: os.stat_result | None = None) -> Path:
    """Write a file, with the times of another one."""
    path.write_bytes(data)
    if like is not None:
        os.utime(path, ns=(like.st_atime_ns, like.st_mtime_ns))
    return path


def kept(directory: Path) -> list[list[object]]:
    found: list[list[object]] = msgspec.json.decode((directory / NAME).read_bytes())
    return found


def test_equal_sizes_and_times_do_not_make_equal_digests(tmp_path: Path, directory: Path) -> None:
    data = os.urandom(3 * MIB + 5)
    first = put(tmp_path / "a.safetensors", data)
    before = weights_digests([first], directory)
    other = put(tmp_path / "b.safetensors", data[:-1] + bytes([data[-1] ^ 1]), first.stat())
    assert weights_digests([other], directory) != before
    assert weights_digests([put(tmp_path / "copy.safetensors", data)], directory) == before
    put(first, data[: MIB + 9] + b"?" + data[MIB + 10 :], first.stat())
    assert weights_digests([first], directory) != before, "it was written in place, and its times set back"
    put(first, data)
    assert weights_digests([first], directory) == before


def test_files_are_read_once(tmp_path: Path, directory: Path) -> None:
    files = [put(tmp_path / name, os.urandom(100)) for name in ("a", "b")]
    digests = weights_digests(files, directory)
    assert [one[-1] for one in kept(directory)] != digests and len(kept(directory)) == 2
    assert os.stat(directory / NAME).st_mode & 0o777 == 0o600
    changed = [[*one[:-1], msgspec.to_builtins(bytes(32))] for one in kept(directory)]
    (directory / NAME).write_bytes(msgspec.json.encode(changed))
    assert weights_digests(files, directory) == [bytes(32)] * 2, "what is kept is taken"
    (directory / NAME).write_bytes(b"[[1,2]]")
    assert weights_digests(files, directory) == digests, "what is broken is made anew"
    assert weights_digests(files, directory / "missing") == digests, "and what cannot be kept is none the less right"


def test_a_file_that_has_just_changed_is_not_kept(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_digest, "SETTLED_S", 60.0)
    file = put(tmp_path / "a", b"now")
    long_ago = time.time_ns() - 10**12
    os.utime(file, ns=(long_ago, long_ago))
    weights_digests([file], directory)
    assert kept(directory) == []


def test_very_large_files_are_sampled(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = put(tmp_path / "a", bytes(5 * MIB))
    whole = weights_digests([file], directory)
    monkeypatch.setattr(weights_digest, "WHOLE_BYTES", MIB)
    sampled = weights_digests([file], directory)
    assert sampled != whole
    for at in (0, MIB - 1, 3 * MIB, 3 * MIB + 65_535, 4 * MIB + 9):
        data = bytearray(5 * MIB)
        data[at] = 1
        put(file, bytes(data), file.stat())
        assert weights_digests([file], directory) != sampled, f"byte {at}"
