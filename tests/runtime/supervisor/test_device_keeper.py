"""The supervisor's copies of descriptors: whoever holds what lies on the device may be killed, and the next one has it again."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mmrt.runtime.process.memory_layout import DEVICE_SOCKET, SPARE_SOCKET
from mmrt.runtime.supervisor.device_keeper import DeviceKeeper
from mmrt.shm.descriptors import fetch_descriptors
from mmrt.shm.errors import MissingError

MEMORY = """
import os, select, sys
from pathlib import Path
from mmrt.shm.descriptors import Descriptor, DescriptorServer, fetch_descriptors
run, made = Path(sys.argv[1]), sys.argv[2]
if made:
    fd = os.memfd_create("kv")
    os.write(fd, made.encode())
    mine = {"kv": Descriptor(fd, len(made))}
else:
    mine = fetch_descriptors(run / "device.spare", 20)
server = DescriptorServer(run / "device", mine)
print("serving", flush=True)
while True:
    select.select([server.fd], [], [])
    server.serve()
"""


def start_memory(run: Path, made: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", MEMORY, str(run), made], stdout=subprocess.PIPE, text=True)


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("nothing came within 20 s")


def content(run: Path, name: str) -> str:
    found = fetch_descriptors(run / name, 20)
    text = os.pread(found["kv"].fd, found["kv"].num_bytes, 0).decode()
    os.close(found["kv"].fd)
    return text


def test_what_a_killed_memory_had_is_there_for_the_next(tmp_path: Path) -> None:
    said: list[str] = []
    killed = start_memory(tmp_path, "all that was computed")
    processes = [killed]

    async def supervise() -> None:
        keeper = DeviceKeeper(tmp_path, said.append)
        keeper.follow(killed.pid)  # as soon as it is there: it may not serve yet
        await until((tmp_path / SPARE_SOCKET).exists)
        killed.kill()
        killed.wait()
        with pytest.raises(MissingError):
            content(tmp_path, DEVICE_SOCKET)
        assert await asyncio.to_thread(content, tmp_path, SPARE_SOCKET) == "all that was computed"
        processes.append(start_memory(tmp_path, ""))
        await asyncio.to_thread(processes[1].stdout.readline)  # type: ignore[union-attr]
        assert await asyncio.to_thread(content, tmp_path, DEVICE_SOCKET) == "all that was computed"
        before = os.stat(tmp_path / SPARE_SOCKET).st_ino
        keeper.follow(processes[1].pid)
        await until(lambda: os.stat(tmp_path / SPARE_SOCKET).st_ino != before)
        keeper.follow(processes[1].pid)  # again and again, as states come
        assert await asyncio.to_thread(content, tmp_path, SPARE_SOCKET) == "all that was computed"
        await keeper.close()
        with pytest.raises(MissingError):
            content(tmp_path, SPARE_SOCKET)

    try:
        num_open = len(os.listdir("/proc/self/fd"))
        asyncio.run(supervise())
        assert len(os.listdir("/proc/self/fd")) <= num_open + 1, "one is the pipe of the second memory"
    finally:
        for process in processes:
            end(process)


def test_a_memory_that_does_not_serve_yet_is_asked_again(tmp_path: Path) -> None:
    said: list[str] = []

    async def supervise() -> None:
        keeper = DeviceKeeper(tmp_path, said.append)
        keeper.follow(1)
        await until(lambda: bool(said))
        late = start_memory(tmp_path, "late")
        try:
            await until((tmp_path / SPARE_SOCKET).exists)
            assert await asyncio.to_thread(content, tmp_path, SPARE_SOCKET) == "late"
        finally:
            await keeper.close()
            end(late)

    asyncio.run(supervise())
    assert "nobody hands out descriptors" in said[0]
