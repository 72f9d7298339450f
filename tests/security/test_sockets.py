"""Who may talk to the inside: sockets are the user's alone, and a stranger who reaches one all the same is not heard."""

import asyncio
import os
import select
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mmrt.runtime.bus import wire
from mmrt.runtime.bus.messages import Hello
from mmrt.runtime.bus.transport import ActorSocket, ControllerSocket, listen_for_controller
from mmrt.runtime.process.notify import NotifyListener
from mmrt.runtime.supervisor.control import StatusRequest, encode
from mmrt.runtime.supervisor.control_server import ControlServer
from mmrt.shm.confined import is_confined
from mmrt.shm.descriptors import Descriptor, DescriptorServer
from mmrt.shm.doorbell import Listener
from mmrt.shm.run_directory import RunDirectory

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that everybody may enter: as if the run directory's mode were no protection."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


def as_nobody(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run Python that becomes another user first: that user may execute no interpreter of ours. Plain sockets, without mmrt."""
    become = f"import os, socket, sys, time; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
    command = [sys.executable, "-I", "-S", "-c", become + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, cwd="/")


def test_every_socket_is_made_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run = RunDirectory.create(tmp_path / "run", {})
        assert mode(run.path) == 0o700
        with Listener(run, "gateway"):
            assert mode(run.path / "gateway.bell") == 0o600
        with socket.socket() as some, DescriptorServer(run.path / "device", {"some": Descriptor(some.fileno(), 0)}):
            assert mode(run.path / "device") == 0o600
        listener = NotifyListener(run.path / "notify")
        assert mode(run.path / "notify") == 0o600
        listener.close()
        bus = ControllerSocket(run.path)
        assert mode(run.path / "bus") == 0o600
        bus.close()
        with listen_for_controller(run.path, "video").socket:
            assert mode(run.path / "video.bus") == 0o600

        async def control() -> None:
            server = ControlServer(run.path / "control", None)  # type: ignore[arg-type]
            await server.start()
            assert mode(run.path / "control") == 0o600
            await server.close()

        asyncio.run(control())
        run.destroy()
    finally:
        os.umask(before)


@needs_root
@pytest.mark.parametrize("name", ["notify", "bus", "control", "device"])
def test_a_stranger_cannot_even_connect(open_directory: Path, name: str) -> None:
    """The socket's mode alone keeps others out, also where the directory does not."""
    path = open_directory / name
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    os.fchmod(listener.fileno(), 0o600)
    listener.bind(str(path))
    listener.listen()
    found = as_nobody("import socket,sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])", str(path))
    listener.close()
    assert "PermissionError" in found.stderr


@needs_root
def test_the_supervisor_hears_no_stranger(open_directory: Path) -> None:
    asked: list[object] = []

    async def serve() -> "subprocess.CompletedProcess[str]":
        async def handler(request: object, pid: int) -> None:
            asked.append(request)

        server = ControlServer(open_directory / "control", handler)  # type: ignore[arg-type]
        await server.start()
        (open_directory / "control").chmod(0o666)
        code = (
            "import socket,sys; s=socket.socket(socket.AF_UNIX); s.settimeout(20); s.connect(sys.argv[1]);"
            "s.sendall(sys.argv[2].encode()+b'\\n'); print(s.recv(100))"
        )
        answer = await asyncio.to_thread(as_nobody, code, str(open_directory / "control"), encode(StatusRequest()).decode())
        await server.close()
        return answer

    answer = asyncio.run(serve())
    assert not asked
    assert answer.stdout == "b''\n" or "Error" in answer.stderr, answer


@needs_root
def test_strangers_get_no_descriptors(open_directory: Path) -> None:
    fd = os.memfd_create("kv")
    with DescriptorServer(open_directory / "device", {"kv": Descriptor(fd, 1)}) as server:
        (open_directory / "device").chmod(0o666)
        code = (
            "import socket,sys; s=socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(20); s.connect(sys.argv[1]);"
            "print('connected', flush=True); print(socket.recv_fds(s, 100, 4))"
        )
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(as_nobody, code, str(open_directory / "device"))
            assert select.select([server.fd], [], [], 20)[0]
            assert server.serve() == 0
            assert answer.result().stdout.splitlines() == ["connected", "(b'', [], 0, None)"]
    os.close(fd)


CONFINED = """
import socket, sys
from pathlib import Path
from mmrt.actors.video.sandbox import enter_sandbox
from mmrt.runtime.bus.messages import Hello
from mmrt.runtime.bus.transport import ActorSocket, listen_for_controller
run = Path(sys.argv[1])
listening = listen_for_controller(run, "video")
device = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
if sys.argv[2] == "device":
    device.connect(str(run / "device"))
enter_sandbox(memory_bytes=1 << 28, file_bytes=100)
if sys.argv[2] == "device":
    print(socket.recv_fds(device, 100, 4))
else:
    bus = ActorSocket(run, sys.argv[2], 1, listening)
    for _ in range(20):
        bus.send(Hello(sys.argv[2], 1, 1, True))
        bus.poll(0.01)
    print("spoken")
"""


def confined(run: Path, what: str) -> "subprocess.Popen[str]":
    """A process of ours in the video process's sandbox."""
    command = [sys.executable, "-c", CONFINED, str(run), what]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_what_decodes_media_gets_no_descriptors(open_directory: Path) -> None:
    fd = os.memfd_create("kv")
    with DescriptorServer(open_directory / "device", {"kv": Descriptor(fd, 1)}) as server:
        process = confined(open_directory, "device")
        while process.poll() is None and not is_confined(process.pid):
            time.sleep(0.01)
        assert select.select([server.fd], [], [], 60)[0]
        num_served = server.serve()
        output, errors = process.communicate(timeout=60)
    os.close(fd)
    if "system calls" in errors:
        pytest.skip(errors)
    assert num_served == 0 and output == "(b'', [], 0, None)\n"


@pytest.mark.parametrize(
    ("name", "is_heard"), [("video", True), ("video.1", False), ("decode", False), ("gateway", False), ("videos", False)]
)
def test_what_decodes_media_speaks_on_the_bus_for_itself_alone(open_directory: Path, name: str, is_heard: bool) -> None:
    process, heard = confined(open_directory, name), []
    controller = ControllerSocket(open_directory, lambda actor: {"video": process.pid, "video.1": 1}.get(actor, 0))
    while process.poll() is None:
        heard += controller.receive()
        time.sleep(0.01)
    heard += controller.receive()
    controller.close()
    output, errors = process.communicate(timeout=60)
    if "system calls" in errors:
        pytest.skip(errors)
    assert output == "spoken\n", errors
    assert {actor for actor, _, _ in heard} == ({name} if is_heard else set())


@needs_root
def test_notifications_of_strangers_are_dropped(open_directory: Path) -> None:
    listener = NotifyListener(open_directory / "notify")
    (open_directory / "notify").chmod(0o666)
    code = "import socket,sys; socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'READY=1', sys.argv[1])"
    assert as_nobody(code, str(open_directory / "notify")).returncode == 0
    assert listener.drain() == []
    listener.close()


@needs_root
def test_the_bus_hears_no_stranger_even_under_a_known_name(open_directory: Path) -> None:
    """The stranger speaks ZMTP by hand and calls itself decode:1, which a friend has been before."""
    controller = ControllerSocket(open_directory)
    (open_directory / "bus").chmod(0o666)
    friend = ActorSocket(open_directory, "decode", 1)
    hello = Hello("decode", 1, os.getpid(), True)
    deadline_s = time.monotonic() + 20
    while not controller.receive():
        friend.send(hello)
        assert time.monotonic() < deadline_s
        friend.poll(0.01)
    friend.close()
    while controller.receive():
        pass
    code = """
import socket, sys, time
s = socket.socket(socket.AF_UNIX); s.settimeout(20); s.connect(sys.argv[1])
s.sendall(b"\\xff" + bytes(8) + b"\\x7f" + b"\\x03\\x00" + b"NULL".ljust(20, b"\\0") + b"\\0" + bytes(31))
def read(n):
    data = b""
    while len(data) < n:
        piece = s.recv(n - len(data))
        if not piece: raise SystemExit("closed")
        data += piece
    return data
read(64)
ready = b"\\x05READY\\x0bSocket-Type\\x00\\x00\\x00\\x06DEALER\\x08Identity\\x00\\x00\\x00\\x08decode:1"
s.sendall(bytes([4, len(ready)]) + ready)
read(2)
for _ in range(20):
    s.sendall(bytes([0, len(sys.argv[2]) // 2]) + bytes.fromhex(sys.argv[2]))
    time.sleep(0.01)
print("spoken")
"""

    spoken = as_nobody(code, str(open_directory / "bus"), wire.encode(hello).hex())
    heard = controller.receive()
    controller.close()
    assert spoken.stdout == "spoken\n", spoken.stderr
    assert heard == []


@needs_root
def test_the_same_words_of_our_own_are_heard(open_directory: Path) -> None:
    """The counterpart of the test above: what it speaks is the protocol."""
    controller = ControllerSocket(open_directory)
    actor = ActorSocket(open_directory, "decode", 1)
    deadline_s = time.monotonic() + 20
    while not (heard := controller.receive()):
        actor.send(Hello("decode", 1, 1, True))
        actor.poll(0.01)
        assert time.monotonic() < deadline_s
    assert heard[0][0] == "decode"
    actor.close()
    controller.close()
