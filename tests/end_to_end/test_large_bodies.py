"""What large bodies cost the real gateway: memory comes back, and the peak has a bound."""

import base64
import json
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from mmrt.tests.end_to_end.conftest import Server

MIB = 1 << 20


def own_of(pid: int) -> int:
    """The memory of a process that no other could have."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:"))


def spooled_of(pid: int) -> int:
    """The memory behind its descriptor of the spool."""
    return sum(os.stat(entry).st_blocks * 512 for entry in Path(f"/proc/{pid}/fd").iterdir() if "mmrt-spool" in link_of(entry))


def link_of(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except OSError:
        return ""


def records_of(pid: int) -> int:
    """What it has mapped of the records of connections."""
    text = Path(f"/proc/{pid}/smaps").read_text().split("mmrt-connections")[-1]
    found = re.search(r"Pss: +(\d+) kB", text)
    return int(found[1]) * 1024 if found else 0


class Watch:
    """The most that a process uses, while this is open."""

    def __init__(self, pid: int) -> None:
        self.own = self.spooled = 0
        self._pid = pid
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(0.01):
            self.own, self.spooled = max(self.own, own_of(self._pid)), max(self.spooled, spooled_of(self._pid))


def body(item_bytes: int) -> bytes:
    """A request with two sounds that are none."""
    parts = [{"type": "input_audio", "input_audio": {"data": base64.b64encode(os.urandom(item_bytes)).decode()}} for _ in range(2)]
    return json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()


def send(server: Server, content: bytes) -> int:
    headers = {"Content-Type": "application/json"}
    return httpx2.post(f"{server.url}/v1/chat/completions", content=content, headers=headers, timeout=120).status_code


@pytest.mark.parametrize(
    "num_bodies, at_once, item_bytes",
    [(2, 1, 16 * MIB), pytest.param(8, 1, 23 * MIB, marks=pytest.mark.slow), pytest.param(8, 8, 23 * MIB, marks=pytest.mark.slow)],
)
def test_memory_comes_back(server: Server, num_bodies: int, at_once: int, item_bytes: int) -> None:
    """The gateway's own memory: what others could share is in records, spool and pages, which have bounds of their own."""
    send(server, body(1 * MIB))  # has all its threads begun
    pid, content = server.pid("gateway"), body(item_bytes)
    before = own_of(pid)
    with Watch(pid) as most, ThreadPoolExecutor(at_once) as clients:
        statuses = list(clients.map(lambda _: send(server, content), range(num_bodies)))
    assert set(statuses) <= ({422} if at_once == 1 else {422, 503}) and server.pid("gateway") == pid
    deadline = time.monotonic() + 10
    while (left := own_of(pid) - before) > 20 * MIB or spooled_of(pid) or records_of(pid) > MIB:
        assert time.monotonic() < deadline, (left, spooled_of(pid), records_of(pid))
        time.sleep(0.1)
    print(left >> 20, (most.own - before) >> 20, most.spooled >> 20, statuses)
    assert most.own - before < 40 * MIB * max(1, at_once // 2)
    assert most.spooled <= (4 + 2 * 0.75) * 64 * MIB  # two threads have media beside their bodies
