"""Run in a process of its own: the video actor of a run, whose first plan is an attack on the other processes of the run.

usage: attacker.py RUN; the attacks' outcomes go to standard output as JSON: "done", or the name of the error. An attack that kills
is made by a fork of the process, which enters the sandbox as it does; its outcome is the signal.
"""

import ctypes
import errno
import fcntl
import json
import mmap
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mmrt.actors.host.actor import Actor, Ending
from mmrt.actors.video import worker
from mmrt.actors.video.sandbox import enter_sandbox
from mmrt.runtime.process.lifeline import Lifeline
from mmrt.runtime.stage_table import InstanceId
from mmrt.shm.pool import PagePool
from mmrt.shm.run_directory import RunDirectory

SOCKETS = ("bus", "control", "notify", "device", "gateway.bell")
CONTROL = (
    "run.json", "api-key", "journal", "saved-pages", "tuning", "endpoint", "outages", "keys", "page-secret", "layout", "LOCK",
    "decode.lock", "generations.lock", "notes/decode.exit", "notes/capture-decode", "notes/capture-video", *SOCKETS,
)  # fmt: skip
PTRACE_ATTACH, PROCESS_VM_READV, PIDFD_GETFD, LANDLOCK_RESTRICT_SELF = 16, 310, 438, 446
MADV_REMOVE, MREMAP_MAYMOVE = 9, 1
libc = ctypes.CDLL(None, use_errno=True)
libc.mremap.restype = ctypes.c_void_p
found: dict[str, str] = {}
held: dict[int, str] = {}  # its descriptors
maps = os.open("/proc/self/maps", os.O_RDONLY)


def attempt(action: Callable[[], object]) -> str:
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


def check(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), "")


def replace(path: Path) -> None:
    part = path.with_name("part")
    part.write_bytes(b"forged")
    os.replace(part, path)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(file.read(1)[:0])


def take_role(path: Path) -> None:
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def cut(path: Path) -> None:
    """To as long as it is: what is tried is the right."""
    with path.open("r+b") as file:
        os.ftruncate(file.fileno(), path.stat().st_size)


def cut_what_is_open() -> None:
    """Files that were opened before."""
    for fd, name in held.items():
        if ".lock" in name or "LOCK" in name:
            os.ftruncate(fd, os.fstat(fd).st_size)


def descriptors() -> dict[int, str]:
    """The open descriptors, and what they are of."""
    paths = {int(fd): f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")}
    return {fd: os.readlink(path) for fd, path in paths.items() if os.path.lexists(path)}


def address(pool: PagePool, what: str) -> int:
    return int(getattr(pool, what).ctypes.data) // mmap.PAGESIZE * mmap.PAGESIZE


def let_write(at: int) -> None:
    check(libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_WRITE))


def grow(at: int) -> None:
    if libc.mremap(ctypes.c_void_p(at), ctypes.c_size_t(4096), ctypes.c_size_t(8192), MREMAP_MAYMOVE) == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "")


def give_back(at: int) -> None:
    check(libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(mmap.PAGESIZE), MADV_REMOVE))


def deadly(actor: Actor) -> dict[str, Callable[[], object]]:
    theirs, run, own = os.getppid(), actor.run.path, actor.notifier._socket
    assert own is not None
    patches = PagePool.attach(actor.run, "patch", "fill")
    return {
        "give patches back": lambda: give_back(address(patches, "data")),
        **{f"connect to {name}": lambda name=name: own.connect(str(run / name)) for name in ("bus", "control")},  # type: ignore[misc]
        "send to a bell": lambda: own.sendto(b"!", str(run / "gateway.bell")),
        "send a descriptor": lambda: socket.send_fds(own, [b"!"], [0]),
        "run a program": lambda: os.execv("/bin/true", ["true"]),
        "kill another": lambda: os.kill(theirs, 0),
        "trace another": lambda: libc.ptrace(PTRACE_ATTACH, theirs, 0, 0),
        "read another's memory": lambda: libc.syscall(PROCESS_VM_READV, theirs, 0, 0, 0, 0, 0),
        "take another's descriptor": lambda: libc.syscall(PIDFD_GETFD, 0, 0, 0),
        "leave the sandbox": lambda: libc.unshare(0x10000000),
        "enter another": lambda: libc.syscall(LANDLOCK_RESTRICT_SELF, -1, 0),
    }


def fate(action: Callable[[], object], enter: Callable[[], object]) -> str:
    """What becomes of a fork that enters the sandbox and does that."""
    pid = os.fork()
    if not pid:
        try:
            enter()
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return signal.Signals(-status).name if status < 0 else f"status {status}"


def mapped(run: RunDirectory) -> dict[str, str]:
    """What is mapped of the run, by its segments: how."""
    rights: dict[str, set[str]] = {}
    with open(maps, closefd=False) as file:
        lines = file.read().splitlines()
    for line in lines:
        _, mode, *_, name = line.split()
        if name.startswith(f"{run.path}/"):
            rights.setdefault(Path(name).stem, set()).add(mode)
    return {name: " ".join(sorted(modes)) for name, modes in rights.items()}


def attack(actor: Actor, media: PagePool, patches: PagePool) -> None:
    run = actor.run.path
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        found[f"make a socket of {kind.name}"] = attempt(lambda kind=kind: socket.socket(socket.AF_UNIX, kind))  # type: ignore[misc]
    for name in CONTROL:
        found[f"read {name}"] = attempt((run / name).read_bytes)
        found[f"replace {name}"] = attempt(lambda name=name: replace(run / name))  # type: ignore[misc]
        found[f"overwrite {name}"] = attempt(lambda name=name: overwrite(run / name))  # type: ignore[misc]
        found[f"remove {name}"] = attempt((run / name).unlink)
    for actor_name in ("decode", "memory"):
        found[f"take the role of {actor_name}"] = attempt(lambda name=actor_name: take_role(run / f"{name}.lock"))  # type: ignore[misc]
    segments = sorted(path for path in run.iterdir() if path.suffix == f".{actor.run.run_id}") if can_list(run) else SEGMENTS
    for path in segments:
        found[f"read {path.stem}"] = attempt(lambda path=path: path.open("rb").close())  # type: ignore[misc]
        found[f"overwrite {path.stem}"] = attempt(lambda path=path: overwrite(path))  # type: ignore[misc]
        found[f"cut {path.stem}"] = attempt(lambda path=path: cut(path))  # type: ignore[misc]
        found[f"truncate {path.stem}"] = attempt(lambda path=path: os.truncate(path, path.stat().st_size))  # type: ignore[misc]
        found[f"remove {path.stem}"] = attempt(path.unlink)
    found["cut what is open"] = attempt(cut_what_is_open)
    for what in ("generations", "_keys", "_key_generations"):
        found[f"write {what} of patches"] = attempt(lambda what=what: let_write(address(patches, what)))  # type: ignore[misc]
    found["write media"] = attempt(lambda: let_write(address(media, "data")))
    found["grow a mapping"] = attempt(lambda: grow(address(patches, "data")))


def can_list(run: Path) -> bool:
    found["list"] = attempt(lambda: os.listdir(run))
    return found["list"] == "done"


def main(run: Path) -> None:
    actor = Actor(InstanceId("video"), RunDirectory.attach(run), Lifeline(None), str(run / "notify"))
    SEGMENTS.extend(path for path in run.iterdir() if path.suffix == f".{actor.run.run_id}")
    pools: list[PagePool] = []

    class Worker:
        def __init__(self, media: PagePool, patches: PagePool, *_: object) -> None:
            pools[:] = [media, patches]

        def close(self) -> None:
            pass

    def serve(*_: object) -> None:
        actor.serving()
        pools[1].scatter_rows([0], np.arange(4, dtype=np.uint8).reshape(1, 4))  # what it is for
        attack(actor, *pools)
        found.update({f"map {name}": rights for name, rights in mapped(actor.run).items()})
        raise Ending

    worker.VideoWorker = Worker  # type: ignore[misc, assignment]

    def enter(**limits: object) -> str:
        held.update(descriptors())
        found.update({f"hold {fd}": name for fd, name in held.items()})
        for name, action in deadly(actor).items():
            found[name] = fate(action, lambda: enter_sandbox(**limits))  # type: ignore[arg-type]
        return enter_sandbox(**limits)  # type: ignore[arg-type]

    worker.enter_sandbox = enter  # type: ignore[assignment]
    worker.PlanLoop.serve = serve  # type: ignore[method-assign, assignment]
    found["key in its configuration"] = actor.config.server.api_key or "none"
    try:
        worker.main(actor)
    except Ending:
        print(json.dumps(found), flush=True)
    actor.close()


SEGMENTS: list[Path] = []

if __name__ == "__main__":
    main(Path(sys.argv[1]))
