"""Run in a process of its own: enter the sandbox, try what is forbidden and what is not, print what came of it as JSON.

usage: sandboxed.py RUN ELSEWHERE VIDEO WALLS; an echo connects to the bus of "video" in RUN, VIDEO is a file to decode, WALLS are
"all", or "landlock" where namespaces and a user id of its own do not help.
"""

import base64
import errno
import fcntl
import importlib
import io
import json
import logging
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from mmrt.actors.host import landlock
from mmrt.actors.video import sandbox, worker
from mmrt.actors.video.sandbox import enter_sandbox, memory_left
from mmrt.media.image import decode_image
from mmrt.media.limits import MediaLimits
from mmrt.media.video import decode_frames
from mmrt.media.video_info import analyse
from mmrt.runtime.bus.messages import Hello
from mmrt.runtime.bus.transport import ActorSocket, Listening, listen_for_controller
from mmrt.runtime.process.notify import Notifier
from mmrt.tests.actors.video.test_worker import MODEL

MEMORY_BYTES = 512 << 20
FILE_BYTES = 1 << 20
MAP_GROWSDOWN = 0x100
PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC")


def attempt(action: Callable[[], object]) -> str:
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    except (ImportError, MemoryError, ValueError) as error:  # resource's word for EPERM
        return type(error).__name__
    return "done"


def write(path: Path, num_bytes: int = 10) -> None:
    with open(path, "wb", buffering=0) as file:
        left = num_bytes
        while left:
            left -= file.write(bytes(left))


def dies(action: Callable[[], object]) -> str:
    """The outcome in a process of its own, which enters the sandbox and may be killed."""
    pid = os.fork()
    if not pid:
        try:
            enter_sandbox(memory_bytes=MEMORY_BYTES, file_bytes=FILE_BYTES)
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"status {os.waitstatus_to_exitcode(status)}"


def echo(run: Path, listening: Listening) -> None:
    """What the actor's bus does, with a context and threads that begin only now."""
    bus = ActorSocket(run, "video", 1, listening)
    while not bus.send(Hello("video", 1, 1, True)):
        bus.poll(0.01)
    while not bus.receive():
        bus.poll(10)
    bus.close()


def notify(notifier: Notifier) -> None:
    notifier.ready()


def in_a_thread(action: Callable[[], object]) -> str:
    outcome: list[str] = []
    thread = threading.Thread(target=lambda: outcome.append(attempt(action)))
    thread.start()
    thread.join()
    return outcome[0]


def connect() -> None:
    with socket.socket() as tcp:
        tcp.connect(("127.0.0.1", 9))


def decode(data: bytes) -> None:
    info = analyse(io.BytesIO(data), MediaLimits())
    assert len(list(decode_frames(io.BytesIO(data), info, range(info.num_frames)))) == info.num_frames


def decode_pictures(pictures: list[bytes]) -> None:
    for picture in pictures:
        assert decode_image(io.BytesIO(picture), MediaLimits()).shape[2] == 3


def made_pictures() -> list[bytes]:
    """One of each format that a library other than Pillow's own decodes."""
    made = []
    for format in ("AVIF", "JPEG2000", "WEBP", "ICO"):
        buffer = io.BytesIO()
        Image.new("RGB", (32, 32), "red").save(buffer, format)
        made.append(buffer.getvalue())
    return made


def landlock_version() -> int:
    try:
        return landlock.system_call(landlock._CREATE_RULESET, None, 0, landlock._VERSION)
    except OSError:
        return 0


def main(run: Path, elsewhere: Path, video: bytes, walls: str) -> None:
    if walls == "landlock":
        sandbox._enter_namespaces = lambda: ""
        sandbox._take_own_id = lambda _: None
    pictures, status = [PNG, *made_pictures()], os.open("/proc/self/status", os.O_RDONLY)
    own_file = (elsewhere / "own").open("wb", buffering=0)
    theirs, version = os.getppid(), landlock_version()
    listening, notifier = listen_for_controller(run, "video"), Notifier(str(run / "notify"), "video")
    notifier.connect()
    readable, _ = os.pipe()
    given = socket.socket()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("")  # Linux gives it a name
    abstract.listen()
    ours, _ = socket.socketpair()
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    deadly: dict[str, Callable[[], object]] = {
        "execve": lambda: os.execv(sys.executable, [sys.executable, "-c", "print('executed')"]),
        "kill": lambda: os.kill(theirs, 0),
        "limits of others": lambda: resource.prlimit(theirs, resource.RLIMIT_CORE),
        "connect what was open": lambda: given.connect(listener.getsockname()),
        "connect to the run": lambda: datagrams.connect(str(run / "notify")),
        "send to the run": lambda: datagrams.sendto(b"READY=1", str(run / "notify")),
        "send descriptors": lambda: socket.send_fds(ours, [b"x"], [readable]),
        "listen": lambda: given.bind(("127.0.0.1", 0)),
        "owner of a file": lambda: fcntl.fcntl(readable, fcntl.F_SETOWN, theirs),
        "signal of a file": lambda: fcntl.fcntl(readable, fcntl.F_SETSIG, signal.SIGKILL),
        "owner of a socket": lambda: fcntl.ioctl(given, 0x8901, theirs.to_bytes(4, sys.byteorder)),
        "type": lambda: fcntl.ioctl(readable, termios.TIOCSTI, b"x"),
    }
    deaths = {what: dies(action) for what, action in deadly.items()}
    worker.load(MODEL)
    problem = enter_sandbox(memory_bytes=MEMORY_BYTES, file_bytes=FILE_BYTES)
    forbidden: dict[str, Callable[[], object]] = {
        "connect": connect,
        "udp": lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM),
        "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
        "fork": os.fork,
        "subprocess": lambda: subprocess.run(["true"], check=False),
        "posix_spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
        "pidfd": lambda: os.pidfd_open(theirs),
        "bind": lambda: socket.socket(socket.AF_UNIX).bind(""),
        "abstract": lambda: socket.socket(socket.AF_UNIX).connect(abstract.getsockname()),
        "rmdir": (elsewhere / "empty").rmdir,
        "niceness of others": lambda: os.setpriority(os.PRIO_PROCESS, theirs, 19),
        "memory of others": lambda: Path(f"/proc/{theirs}/mem").open("rb").close(),
        "environment of others": Path(f"/proc/{theirs}/environ").read_bytes,
        "chmod": lambda: (elsewhere / "old").chmod(0o777),
        "utime": lambda: os.utime(elsewhere / "old"),
        "attribute": lambda: os.setxattr(elsewhere / "old", "user.mmrt", b"x"),
        "chown": lambda: os.chown(run, 1, 1),
        "read": (elsewhere / "old").read_bytes,
        "list": lambda: os.listdir(elsewhere),
        "home": lambda: os.listdir(Path.home()),
        "terminals": lambda: os.listdir("/dev/pts"),
        "other processes": Path(f"/proc/{theirs}/cmdline").read_bytes,
        "own memory": Path("/proc/self/maps").read_bytes,
        "working directory": lambda: os.listdir(os.curdir),
        "code": Path(sandbox.__file__).read_bytes,
        "import": lambda: importlib.import_module("colorsys"),
        "programs": Path("/bin/true").read_bytes,
        "null": lambda: write(Path(os.devnull)),
        "write": lambda: write(elsewhere / "new"),
        "overwrite": lambda: write(elsewhere / "old"),
        "remove": (elsewhere / "old").unlink,
        "truncate": lambda: os.truncate(elsewhere / "old", 0),
        "link": lambda: os.symlink("/etc/passwd", elsewhere / "link"),
        "mkdir": (elsewhere / "more").mkdir,
        "write in the run": lambda: write(run / "new"),
        "write a note": lambda: write(run / "notes" / "note"),
        "list the run": lambda: os.listdir(run),
        "read in the run": (run / "secret").read_bytes,
        "remove in the run": (run / "secret").unlink,
        "large file": lambda: os.pwrite(own_file.fileno(), b"x", FILE_BYTES),
        "memory": lambda: bytearray(2 * MEMORY_BYTES),
        "memory without a limit": lambda: mmap.mmap(-1, 4096),
        "memory as a stack": lambda: mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_GROWSDOWN),
        "a large stack": lambda: resource.setrlimit(resource.RLIMIT_STACK, (1 << 30, 1 << 30)),
        "file in memory": lambda: os.memfd_create("x"),
        "core": lambda: resource.setrlimit(resource.RLIMIT_CORE, (4096, 4096)),
    }
    allowed: dict[str, Callable[[], object]] = {
        "write what is open": lambda: own_file.write(b"x"),
        "decode pictures": lambda: decode_pictures(pictures),
        "bus": lambda: echo(run, listening),
        "notify": lambda: notify(notifier),
        "kill itself": lambda: os.kill(os.getpid(), 0),
        "decode": lambda: decode(video),
    }
    outcome = {
        "deaths": deaths,
        "forbidden": {what: attempt(action) for what, action in forbidden.items()},
        "in a thread": {what: in_a_thread(forbidden[what]) for what in ("connect", "fork", "write")},
        "allowed": {what: attempt(action) for what, action in allowed.items()},
        "status": os.pread(status, 1 << 16, 0).decode(),
        "ids": [*os.getresuid(), *os.getresgid(), *os.getgroups()],
        "problem": problem,
        "core": resource.getrlimit(resource.RLIMIT_CORE),
        "memory left": memory_left(),
        "landlock": version,
    }
    print(json.dumps(outcome), flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]).read_bytes(), sys.argv[4])
