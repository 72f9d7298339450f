"""Descriptors handed to other processes: real memory behind them, replaced servers, strangers, and servers that are gone."""

import os
import select
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmrt.shm.descriptors import MAX_DESCRIPTORS, Descriptor, DescriptorServer, fetch_descriptors
from mmrt.shm.errors import MissingError, ShmError

READER = """
import os, sys
from pathlib import Path
from mmrt.shm.descriptors import fetch_descriptors
found = fetch_descriptors(Path(sys.argv[1]), 20)
assert not any(os.get_inheritable(descriptor.fd) for descriptor in found.values())
for name, (fd, num_bytes) in found.items():
    print(name, num_bytes, os.pread(fd, num_bytes, 0).decode())
os.pwrite(found["kv"].fd, b"written", 0)
"""
CONNECTS_ONLY = """
import socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.connect(sys.argv[1])
"""


def memory(content: bytes) -> Descriptor:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return Descriptor(fd, len(content))


@pytest.fixture
def descriptors() -> Iterator[dict[str, Descriptor]]:
    made = {"weights": memory(b"one two"), "kv": memory(b"seven 7")}
    yield made
    for descriptor in made.values():
        os.close(descriptor.fd)


def run(script: str, path: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", script, str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def serve_one(server: DescriptorServer) -> int:
    """Wait for somebody, as the memory actor's loop does, and answer."""
    assert select.select([server.fd], [], [], 20)[0]
    return server.serve()


def test_another_process_has_the_same_memory(tmp_path: Path, descriptors: dict[str, Descriptor]) -> None:
    path = tmp_path / "device"
    with DescriptorServer(path, descriptors) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        reader = run(READER, path)
        assert serve_one(server) == 1
        printed, complained = reader.communicate(timeout=20)
    assert printed.splitlines() == ["weights 7 one two", "kv 7 seven 7"], complained
    assert os.pread(descriptors["kv"].fd, 7, 0) == b"written"


def test_a_new_server_takes_the_place_of_an_old_one(tmp_path: Path, descriptors: dict[str, Descriptor]) -> None:
    path = tmp_path / "device"
    with DescriptorServer(path, descriptors) as old, DescriptorServer(path, {"kv": descriptors["kv"]}) as new:
        reader = run(READER, path)
        assert serve_one(new) == 1
        assert reader.communicate(timeout=20)[0].startswith("kv 7 ")
        assert old.serve() == 0
    assert [file.name for file in tmp_path.iterdir()] == ["device"]


def test_who_leaves_at_once_does_no_harm(tmp_path: Path, descriptors: dict[str, Descriptor]) -> None:
    path = tmp_path / "device"
    with DescriptorServer(path, descriptors) as server:
        subprocess.run([sys.executable, "-c", CONNECTS_ONLY, str(path)], check=True, timeout=20)
        serve_one(server)
        reader = run(READER, path)
        assert serve_one(server) == 1
        assert reader.communicate(timeout=20)[0]


def test_nobody_is_there(tmp_path: Path, descriptors: dict[str, Descriptor]) -> None:
    with pytest.raises(MissingError, match="nobody hands out descriptors"):
        fetch_descriptors(tmp_path / "device", 1)
    DescriptorServer(tmp_path / "device", descriptors).close()
    with pytest.raises(MissingError, match="nobody hands out descriptors"):
        fetch_descriptors(tmp_path / "device", 1)


def test_a_server_that_does_not_answer(tmp_path: Path, descriptors: dict[str, Descriptor]) -> None:
    with DescriptorServer(tmp_path / "device", descriptors), pytest.raises(ShmError, match=r"nothing within 0\.05 s"):
        fetch_descriptors(tmp_path / "device", 0.05)


def test_an_answer_without_its_descriptors_is_refused(tmp_path: Path) -> None:
    """As when the receiver has no room for them: the kernel drops what does not fit."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "device"))
        listener.listen()
        script = READER.replace('os.pwrite(found["kv"].fd, b"written", 0)', "")
        reader = run(script, tmp_path / "device")
        connection, _ = listener.accept()
        with connection:
            connection.send(b'{"kv": 7}')
        assert "has sent 0 descriptors for 1 names" in reader.communicate(timeout=20)[1]


def test_the_most_that_fit(tmp_path: Path) -> None:
    many = {f"{number:>0100}": memory(str(number).encode()) for number in range(MAX_DESCRIPTORS)}
    with DescriptorServer(tmp_path / "device", many) as server:
        reader = run(READER.replace('found["kv"].fd', "fd"), tmp_path / "device")
        assert serve_one(server) == 1
        lines = reader.communicate(timeout=20)[0].splitlines()
    assert [line.split()[2] for line in lines] == [str(number) for number in range(MAX_DESCRIPTORS)]
    for descriptor in many.values():
        os.close(descriptor.fd)
