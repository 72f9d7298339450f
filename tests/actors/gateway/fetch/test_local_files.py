"""Files under the roots are read; nothing else is, by whatever path, link or kind of file."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from mmrt.actors.gateway.fetch import local_files
from mmrt.actors.gateway.fetch.local_files import NO_FILE, read_file
from mmrt.actors.gateway.reading.url_rules import FetchError, check_file_url

LIMIT = 10_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a picture, beside a secret."""
    (tmp_path / "media" / "below").mkdir(parents=True)
    (tmp_path / "media" / "below" / "a b.png").write_bytes(b"picture")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "secret").write_bytes(b"secret")
    return tmp_path / "media"


def read(url: str, root: Path) -> bytearray:
    return read_file(check_file_url(url), [str(root)], LIMIT)


def refusal(url: str, root: Path) -> tuple[int, str]:
    with pytest.raises(FetchError) as caught:
        read(url, root)
    return caught.value.status, caught.value.message


def test_files_below_the_root(root: Path) -> None:
    for path in ("below/a%20b.png", "below/../below/a%20b.png", "below//a%20b.png"):
        assert read(f"file://{root}/{path}", root) == b"picture"
    assert read(f"FILE://localhost{root}/below/a%20b.png", root) == b"picture"
    (root / "link.png").symlink_to(root / "below" / "a b.png")
    assert read(f"file://{root}/link.png", root) == b"picture", "a link within the root"
    (root.parent / "other").symlink_to(root)
    assert read_file(str(root / "link.png"), [str(root.parent / "other")], LIMIT) == b"picture", "a root that is a link"


@pytest.mark.parametrize(
    "path",
    [
        "../secret",
        "..%2fsecret",
        "%2e%2e/secret",
        "below/../../secret",
        "../media2/secret",  # begins like the root
        "..",
        "",
        "none.png",
        "below",
        "link",  # to the secret
        "up/secret",  # a link to the directory above
        "loop",
        "pipe",
        "socket",
        "proc/self/environ",
        "memory",
        "null",
        "x" * 300,
    ],
)
def test_everything_else(root: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "link").symlink_to("../secret")
    (root / "up").symlink_to("..")
    (root / "loop").symlink_to("loop")
    (root / "proc").symlink_to("/proc")
    (root / "memory").symlink_to("/proc/self/mem")
    (root / "null").symlink_to("/dev/null")
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(root)  # names of sockets are short
        listener.bind("socket")
        assert refusal(f"file://{root}/{path or '.'}", root) == (422, NO_FILE)


def test_files_of_the_kernel_are_none_even_below_a_root() -> None:
    for path in ("/proc/self/environ", "/proc/self/root/etc/passwd", "/proc/version", "/sys/kernel/mm/transparent_hugepage/enabled"):
        with pytest.raises(FetchError, match="no file that may be read"):
            read_file(path, ["/proc", "/sys"], LIMIT)


def test_a_place_without_the_kernels_file_systems(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their directories are ordinary ones there, of the same device as all files."""
    monkeypatch.setattr(local_files, "_device_of", lambda path: os.stat(root).st_dev)
    assert read(f"file://{root}/below/a%20b.png", root) == b"picture"


def test_sizes(root: Path) -> None:
    (root / "large").write_bytes(bytes(LIMIT + 1))
    (root / "most").write_bytes(bytes(LIMIT))
    (root / "empty").touch()
    assert refusal(f"file://{root}/large", root) == (413, f"has {LIMIT + 1} bytes, the limit is {LIMIT} (media.max_item_mib)")
    assert refusal(f"file://{root}/empty", root) == (422, "is empty")
    assert len(read(f"file://{root}/most", root)) == LIMIT


def test_memory_follows_from_the_file_not_from_the_limit(root: Path) -> None:
    data = os.urandom(local_files._CHUNK_BYTES + 1)
    (root / "large").write_bytes(data)
    assert read_file(str(root / "large"), [str(root)], 1 << 60) == data


@pytest.mark.parametrize("swap", ["file", "directory"])
def test_a_link_that_is_put_there_after_the_check(root: Path, monkeypatch: pytest.MonkeyPatch, swap: str) -> None:
    walk: Callable[..., int] = local_files._walk

    def late(base: str, names: list[str]) -> int:
        if swap == "file":
            (root / "below" / "a b.png").unlink()
            (root / "below" / "a b.png").symlink_to("../../secret")
        else:
            (root.parent / "a b.png").write_bytes(b"secret")
            (root / "below").rename(root / "away")
            (root / "below").symlink_to("..")
        return walk(base, names)

    monkeypatch.setattr(local_files, "_walk", late)
    assert refusal(f"file://{root}/below/a%20b.png", root) == (422, NO_FILE)


def test_no_descriptor_is_left(root: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        read(f"file://{root}/below/a%20b.png", root)
        refusal(f"file://{root}/below/none/none", root)
        refusal(f"file://{root}/below", root)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("file://other/etc/passwd", "expected file:///PATH"),
        ("file:/etc/passwd", "expected file:///PATH"),
        ("file:etc/passwd", "expected file:///PATH"),
        ("file:///a?b", "expected file:///PATH"),
        ("file:///a#b", "expected file:///PATH"),
        ("file://me@localhost/a", "expected file:///PATH"),
        ("file:///a%00b", "zero byte"),
        ("file:///a\\b", "backslash"),
        (f"file:///{'a' * 5000}", "the limit is 4096"),
    ],
)
def test_urls_that_name_no_file(url: str, said: str) -> None:
    with pytest.raises(FetchError) as caught:
        check_file_url(url)
    assert caught.value.status == 400 and said in caught.value.message
