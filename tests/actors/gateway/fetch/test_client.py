"""The fetch process as the gateway uses it: many fetches at a time, and it may die, hang, or not start."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import uvloop

from mmrt.actors.gateway.fetch import client as fetch_client
from mmrt.actors.gateway.fetch import frames
from mmrt.actors.gateway.fetch.client import FetchClient
from mmrt.actors.gateway.fetch.download import UNREACHABLE
from mmrt.actors.gateway.reading.url_rules import FetchError
from mmrt.runtime.config.fetch import FetchSection
from mmrt.tests.actors.gateway.fetch.conftest import PICTURE, Server, answer, serving

MIB = 1 << 20


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def facts(pid: int) -> tuple[str, str]:
    return Path(f"/proc/{pid}/limits").read_text(), Path(f"/proc/{pid}/status").read_text()


class Scene:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.rules = FetchSection(
            allowed_hosts=("127.0.0.1",), schemes=("http",), ports=(server.port,), allowed_networks=("127.0.0.0/8",), timeout_s=15
        )
        self.client = FetchClient(self.rules)
        self.opened = asyncio.Event()
        self.closed = asyncio.Event()
        self.go_on = asyncio.Event()
        server.answers["/slow"] = self._slow

    async def _slow(self, writer: asyncio.StreamWriter) -> None:
        writer.write(answer()[:1000])
        gone = asyncio.ensure_future(self.server.readers[-1].read())
        self.opened.set()
        going = asyncio.ensure_future(self.go_on.wait())
        await asyncio.wait([going, gone], return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            self.closed.set()
        else:
            writer.write(answer()[1000:])
        going.cancel()
        gone.cancel()

    async def get(self, path: str = "/a.png", max_bytes: int = MIB) -> bytes:
        return await self.client.fetch(self.server.url(path), max_bytes)

    async def refusal(self, fetching: Awaitable[bytes]) -> tuple[int, str]:
        with pytest.raises(FetchError) as caught:
            await fetching
        return caught.value.status, caught.value.message

    @property
    def pid(self) -> int:
        assert self.client.pid is not None
        return self.client.pid


def run(test: Callable[[Scene], Awaitable[None]]) -> None:
    async def play() -> None:
        async with serving() as server:
            scene = Scene(server)
            try:
                async with asyncio.timeout(60):
                    await test(scene)
            finally:
                await scene.client.close()
                assert scene.client.pid is None or is_gone(scene.client.pid)

    uvloop.run(play())


def test_fetches_side_by_side_and_their_errors() -> None:
    async def test(scene: Scene) -> None:
        assert scene.client.pid is None, "nothing runs before the first URL"
        large = os.urandom(20 * MIB)
        scene.server.answers["/large"] = answer(large)
        slow = asyncio.ensure_future(scene.get("/slow"))
        await scene.opened.wait()
        assert await asyncio.gather(*(scene.get() for _ in range(8))) == [PICTURE] * 8
        assert await scene.get("/large", 32 * MIB) == large
        assert await scene.refusal(scene.get("/large")) == (413, f"has {20 * MIB} bytes, the limit is {MIB} (media.max_item_mib)")
        assert await scene.refusal(scene.client.fetch("http://10.0.0.1/", MIB)) == (
            400,
            'has the host "10.0.0.1", which is not allowed (media.fetch.allowed_hosts)',
        )
        scene.go_on.set()
        assert await slow == PICTURE

    run(test)


def test_a_process_that_is_killed_in_the_middle_is_replaced_and_the_url_fetched_again() -> None:
    async def test(scene: Scene) -> None:
        slow = [asyncio.ensure_future(scene.get("/slow")) for _ in range(3)]
        await scene.opened.wait()
        first = scene.pid
        scene.go_on.set()
        os.kill(first, signal.SIGKILL)
        assert await asyncio.gather(*slow) == [PICTURE] * 3
        assert await scene.get() == PICTURE
        assert scene.pid != first and is_gone(first)

    run(test)


def test_a_process_that_dies_twice_fails_the_fetch_alone() -> None:
    async def test(scene: Scene) -> None:
        slow = asyncio.ensure_future(scene.get("/slow"))
        for _ in range(2):
            await scene.opened.wait()
            scene.opened.clear()
            os.kill(scene.pid, signal.SIGKILL)
        assert await scene.refusal(slow) == (500, "the fetch process failed")
        assert await scene.get() == PICTURE

    run(test)


def test_a_process_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(scene: Scene) -> None:
        assert await scene.get() == PICTURE
        first = scene.pid
        os.kill(first, signal.SIGSTOP)
        monkeypatch.setattr(fetch_client, "GRACE_S", 0.3 - scene.rules.timeout_s)
        assert await scene.refusal(scene.get()) == (503, "the fetch process did not answer in time")
        monkeypatch.undo()
        assert await scene.get() == PICTURE and scene.pid != first

    run(test)


HOSTILE = """
import msgspec, struct, sys, time
def take(): return sys.stdin.buffer.read(*struct.unpack("<I", sys.stdin.buffer.read(4)))
def write(data):
    sys.stdout.buffer.write(struct.pack("<I", len(data)) + data)
    sys.stdout.buffer.flush()
take()
write(msgspec.msgpack.encode([0]))
take()
{}
sys.stdout.buffer.flush()
time.sleep(100)
"""


@pytest.mark.parametrize(
    "answer",
    [
        "write(msgspec.msgpack.encode([1, 1 << 40]))",  # a medium beyond the limit
        "write(msgspec.msgpack.encode([1, -1]))",
        "write(b'no message')",
        "sys.stdout.buffer.write(bytes([255] * 4))",  # a frame of 4 GiB
    ],
)
def test_a_process_that_a_server_has_taken_over_is_ended(answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE.format(answer))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def test(scene: Scene) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(fetch_client, "_MODULE", "hostile")
            assert await scene.refusal(scene.get()) == (500, "the fetch process failed")
            assert is_gone(scene.pid)
        assert await scene.get() == PICTURE

    run(test)


def test_a_process_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(scene: Scene) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(fetch_client, "_MODULE", "no.such.module")
            assert await scene.refusal(scene.get()) == (500, "the fetch process failed")
        assert await scene.get() == PICTURE

    run(test)


def test_a_fetch_that_nobody_waits_for_ends() -> None:
    """Its server sees the connection close; others go on."""

    async def test(scene: Scene) -> None:
        slow = asyncio.ensure_future(scene.get("/slow"))
        await scene.opened.wait()
        slow.cancel()
        await scene.closed.wait()
        assert await scene.get() == PICTURE
        assert scene.client._num_fetches == 0

    run(test)


def test_there_is_a_limit_on_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_client, "MAX_FETCHES", 1)

    async def test(scene: Scene) -> None:
        slow = asyncio.ensure_future(scene.get("/slow"))
        await scene.opened.wait()
        assert await scene.refusal(scene.get()) == (503, "1 media are being fetched, the limit is 1")
        scene.go_on.set()
        assert await slow == PICTURE

    run(test)


def test_the_process_ends_with_its_input_and_forbids_itself_new_privileges() -> None:
    async def test(scene: Scene) -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, "-P", "-m", fetch_client._MODULE, stdin=pipe, stdout=pipe)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(frames.frame(scene.rules))
        assert frames.decode_fetched(await frames.read_frame(process.stdout)).number == 0
        limits, status = facts(process.pid)
        process.stdin.close()
        assert await process.wait() == 0
        assert "NoNewPrivs:\t1" in status
        assert all(re.search(rf"Cap{kind}:\s0+\n", status) for kind in ("Eff", "Prm", "Inh", "Amb"))  # root's, too
        assert re.search("Max file size +0 ", limits) and re.search("Max core file size +1 ", limits)

    run(test)


def test_rules_pass_to_the_process_unchanged() -> None:
    rules = FetchSection(allowed_hosts=("*.a.org",), schemes=("http",), ports=(8080,), allowed_networks=("10.0.0.0/8",), timeout_s=2.5)
    assert frames.decode_rules(msgspec.msgpack.encode(rules)) == rules


def test_the_same_words_for_all_that_cannot_be_reached() -> None:
    async def test(scene: Scene) -> None:
        scene.client = FetchClient(msgspec.structs.replace(scene.rules, allowed_networks=()))
        assert await scene.refusal(scene.get()) == (422, UNREACHABLE)
        assert scene.server.requests == []

    run(test)


CONFINED = """
import errno, os, resource, socket, ssl, subprocess, sys
from pathlib import Path
from mmrt.actors.gateway.fetch.process import confine, restrict
from mmrt.runtime.config.fetch import FetchSection
place = Path(sys.argv[1])
restrict()
confine(FetchSection(allowed_roots=(str(place / "root"),)))
def attempt(action):
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno]
    except ValueError:
        return "ValueError"
    return "done"
parent = f"/proc/{os.getppid()}"
print(
    attempt((place / "root" / "file").read_bytes), attempt(lambda: socket.getaddrinfo("localhost", 1)),
    attempt(lambda: socket.create_connection(("127.0.0.1", int(sys.argv[2])))), attempt(ssl.create_default_context),
)
print(
    attempt((place / "secret").read_bytes), attempt(lambda: os.listdir(place)), attempt(Path(parent, "environ").read_bytes),
    attempt(lambda: (place / "root" / "new").write_bytes(b"x")), attempt((place / "root" / "file").unlink),
    attempt(lambda: os.execv("/bin/true", ["true"])),
)
print(
    attempt(lambda: socket.socket(socket.AF_UNIX)), attempt(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)),
    attempt(lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)), attempt(os.fork),
    attempt(lambda: os.memfd_create("x")), attempt(lambda: os.posix_spawn("/bin/true", ["true"], {})),
    attempt(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"READY=1", str(place / "notify"))),
)
print(*(attempt(lambda: resource.setrlimit(kind, (1 << 40, 1 << 40))) for kind in range(5)))
"""


def test_it_reads_what_it_is_allowed_and_needs_alone(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    for name in ("root/file", "secret"):
        (tmp_path / name).write_text(name)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(tmp_path / "notify"))
        arguments = [str(tmp_path), str(listener.getsockname()[1])]
        done = subprocess.run([sys.executable, "-c", CONFINED, *arguments], capture_output=True, text=True, timeout=60)
    if "does not restrict files" in done.stderr:
        pytest.skip(done.stderr)
    allowed, files, calls, limits = done.stdout.splitlines()
    assert (allowed, files) == (" ".join(["done"] * 4), " ".join(["EACCES"] * 4 + ["EPERM"] * 2)), done.stderr
    if "does not restrict system calls" not in done.stderr:
        assert (set(calls.split()), set(limits.split()[1:4])) == ({"EPERM"}, {"ValueError"}), done.stderr


def test_the_process_confines_itself_before_its_first_fetch(tmp_path: Path) -> None:
    """A directory in the place of a root is another one, and was not allowed."""
    root = tmp_path / "root"

    async def main() -> None:
        client, found = FetchClient(FetchSection(allowed_roots=(str(root),), timeout_s=15)), []
        for _ in range(2):
            root.mkdir()
            (root / "a.png").write_bytes(PICTURE)
            try:
                found.append(await client.fetch(f"file://{root}/a.png", MIB))
            except FetchError as error:
                found.append(error.status)
            root.rename(tmp_path / f"old{len(found)}")
        await client.close()
        assert found == [PICTURE, 422]

    uvloop.run(main())
