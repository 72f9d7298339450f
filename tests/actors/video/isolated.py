"""Run in a process of its own: the video process's part with decoders of their own, some of which are attackers; print what came of it.

usage: isolated.py; JSON goes to standard output. The medium's path says what its decoder does.
"""

import errno
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from mmrt.actors.host import landlock
from mmrt.actors.video import isolated, worker
from mmrt.actors.video.isolated import IsolatedWorker, ItemBytes, RowSender, serve_item
from mmrt.actors.video.template import Template
from mmrt.actors.video.worker import VideoWorker
from mmrt.runtime.bus.messages import Analysed, Done, ItemError, Overran, PageRun, Result
from mmrt.runtime.bus.plans import Analyse, Plan, PreprocessSegment
from mmrt.runtime.bus.wire import encode
from mmrt.runtime.config.sections import MediaSection
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.actors.video.test_worker import MODEL, ROW_BYTES, Bench, encoded
from mmrt.tests.media.conftest import encode_video

LIMIT_S = 20.0
PTRACE_ATTACH, PROCESS_VM_READV, SECCOMP = 16, 310, 317
seen: list[str] = []  # of media, in the decoder's own memory


def attempt(action: Callable[[], object]) -> str:
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


ATTEMPTS: dict[str, Callable[[], object]] = {  # what is refused, and not deadly
    "fork": os.fork,
    "a pair of sockets": socket.socketpair,
    "a socket": socket.socket,
    "wait": lambda: os.waitpid(-1, os.WNOHANG),
    "a file in memory": lambda: os.memfd_create("x"),
    "list": lambda: os.listdir("/"),
    "processes": lambda: os.listdir("/proc"),
    "a file": lambda: open("/etc/passwd"),
    "code": lambda: open(worker.__file__),
    "own memory": lambda: open("/proc/self/maps"),
}
DEADLY: dict[str, Callable[[socket.socket], object]] = {
    "kill the template": lambda _: os.kill(1, signal.SIGKILL),
    "kill a decoder": lambda _: os.kill(os.getpid() - 1, signal.SIGKILL),
    "trace the template": lambda _: landlock.libc().ptrace(PTRACE_ATTACH, 1, 0, 0),
    "read the template": lambda _: landlock.libc().syscall(PROCESS_VM_READV, 1, 0, 0, 0, 0, 0),
    "send a descriptor": lambda channel: socket.send_fds(channel, [b"x"], [1]),
    "another filter": lambda _: landlock.libc().syscall(SECCOMP, 1, 0, 0),
    "run a program": lambda _: os.execv("/bin/true", ["true"]),
    "new namespaces": lambda _: landlock.libc().unshare(0x10000000),
    "owner": lambda channel: fcntl.fcntl(channel, fcntl.F_SETOWN, 1),
}


class Attacker(VideoWorker):
    """A decoder that has been taken over, where its medium says so."""

    channel: socket.socket

    def execute(self, plan: Plan, alone: bool = False) -> Result:
        assert isinstance(plan, Analyse | PreprocessSegment)
        what, _, which = plan.media.path.partition(":")
        found = list(seen)
        seen.append(f"{plan.row}.{plan.row_generation}.{plan.item}")
        if what == "spy":
            return ItemError(400, json.dumps(found))
        if what == "attack":
            return ItemError(400, json.dumps({name: attempt(action) for name, action in ATTEMPTS.items()}))
        if what == "deadly":
            DEADLY[which](self.channel)
        if what == "hang":
            time.sleep(1000)
        if what == "raise":
            raise RuntimeError("a fault of ours")
        if what == "exit":
            os._exit(3)
        if what == "forge":
            FORGED[which](self.channel)
        if what == "forge rows" and isinstance(plan, PreprocessSegment):
            FORGED_ROWS[which](self.channel, plan.shape.segments[plan.segment].num_rows)
        if what == "leave late":
            time.sleep(0.7)
            self.channel.close()
            time.sleep(1000)
        return super().execute(plan, alone)


def send(channel: socket.socket, data: bytes, more: bytes = b"") -> None:
    isolated._send(channel, data)
    channel.sendall(more)


def rows(channel: socket.socket, first: int, count: int) -> None:
    send(channel, encode(isolated.Rows(first, count, ROW_BYTES)), bytes(count * ROW_BYTES))


def done(channel: socket.socket) -> None:
    send(channel, encode(isolated.Outcome(Done(), 0)))


def drip(channel: socket.socket, pause_s: float, count: int) -> None:
    """Begin a reply that is never whole."""
    channel.sendall(isolated._LENGTH.pack(isolated.MAX_REPLY_BYTES))
    for _ in range(count):
        channel.send(b"x")
        if pause_s:
            time.sleep(pause_s)


FORGED: dict[str, Callable[[socket.socket], object]] = {
    "no reply": lambda channel: send(channel, b"\xc1 nonsense"),
    "a reply of a gigabyte": lambda channel: channel.sendall(isolated._LENGTH.pack(1 << 30)),
    "rows of an analysis": lambda channel: send(channel, encode(isolated.Rows(0, 1, 1176)), bytes(1176)),
    "done with an analysis": lambda channel: send(channel, encode(isolated.Outcome(Done(), 0))),
    "an excess that nobody asked for": lambda channel: send(channel, encode(isolated.Outcome(Overran(), 0))),
    "half a reply": lambda channel: (channel.sendall(isolated._LENGTH.pack(100) + b"x"), os._exit(0)),
    "a drop at a time": lambda channel: drip(channel, 0.2, 100),
    "drops without a pause": lambda channel: drip(channel, 0.0, 10_000_000),
    "less than nothing": lambda channel: send(channel, encode(isolated.Outcome(ItemError(400, ""), -1))),
}
FORGED_ROWS: dict[str, Callable[[socket.socket, int], object]] = {  # of a segment with so many
    "some twice": lambda channel, count: [rows(channel, 0, count - 1), rows(channel, 0, 1), done(channel)],
    "none": lambda channel, count: rows(channel, 0, 0),
    "too many": lambda channel, count: rows(channel, 0, count + 1),
    "not all": lambda channel, count: [rows(channel, 0, count - 1), done(channel)],
}


def make_worker(item: ItemBytes, rows: RowSender, yields: bool) -> VideoWorker:
    made = Attacker(item, rows, MODEL, MediaSection(), yields=yields)
    made.channel = rows._channel
    return made


def processes(name: str) -> list[int]:
    """Those below this one with a name."""
    found, waiting = [], [os.getpid()]
    while waiting:
        pid = waiting.pop()
        try:
            children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
            if Path(f"/proc/{pid}/comm").read_text().strip() == f"mmrt-{name}" and Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
        waiting += children
    return found


def settle(number: int) -> int:
    """Wait until so many decoders live, one ahead among them. Returns how many do."""
    until_s = time.monotonic() + 60
    while (found := len(processes("decoder"))) != number and time.monotonic() < until_s:
        time.sleep(0.01)
    return found


def named(bench: Bench, path: str, data: bytes, kind: str = "image", **more: Any) -> Analyse:
    plan = bench.analyse_plan(kind, data, **more)
    return msgspec.structs.replace(plan, media=msgspec.structs.replace(plan.media, path=path))


def media() -> dict[str, tuple[str, bytes]]:
    random = np.random.default_rng(1)
    photo = Image.fromarray(random.integers(0, 255, (150, 211, 3), np.uint8))
    video = encode_video(options={"bf": "2"})
    return {
        "PNG": ("image", encoded(photo)),
        "JPEG": ("image", encoded(photo, "JPEG")),
        "video": ("video", video),
        "cut video": ("video", video[: len(video) // 3]),
        "no picture": ("image", b"no picture"),
        "nothing": ("image", b""),
        "a picture for a video": ("video", encoded(photo)),
    }


def compare(bench: Bench, workers: dict[str, Any], kill: bool = False) -> dict[str, Any]:
    """Whether both workers make the same of each medium; ``kill``: while a decoder is at work, it is killed once for each plan."""
    outcomes: dict[str, Any] = {}
    for number, (name, (kind, data)) in enumerate(media().items()):
        made = {}
        for which, one in workers.items():
            bench.worker = one
            plan = bench.analyse_plan(kind, data, row=number, generation=2 + kill)
            with killing() if kill and which == "process" else nothing():
                result = one.execute(plan)
            rows = []
            if isinstance(result, Analysed):
                for segment in range(len(result.shape.segments)):
                    with killing() if kill and which == "process" else nothing():
                        rows.append(bench.rows(plan, result.shape, segment).tobytes())
            made[which] = (repr(result), rows)
        assert made["process"][0] == made["shared"][0], (made["process"][0], made["shared"][0])
        outcomes[name] = [made["process"][1] == made["shared"][1], made["shared"][0][:40], len(made["shared"][1])]
    return outcomes


@contextmanager
def nothing() -> Iterator[None]:
    yield


kills: list[int] = []


@contextmanager
def killing() -> Iterator[None]:
    """Kill each decoder that there is, after a while."""
    theirs = processes("decoder")
    after_s = np.random.default_rng(len(kills)).uniform(0, 0.02)

    def kill() -> None:
        time.sleep(after_s)
        for pid in theirs:
            try:
                os.kill(pid, signal.SIGKILL)
                kills.append(pid)
            except ProcessLookupError:
                pass

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def facts(pid: int, run: Path) -> dict[str, Any]:
    """What the kernel tells of a decoder."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    spaces = ("net", "ipc", "uts", "mnt", "pid")
    return {
        "of the run": [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if str(run.parent) in line],
        "descriptors": sorted(link.partition(":")[0] for link in links),
        "numbers": status["NSpid"].split(),
        "filters": int(status["Seccomp_filters"]),
        "uid": int(status["Uid"].split()[0]),
        "capabilities": {status[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16},
        "namespaces": [kind for kind in spaces if os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")],
    }


def forge_rows(bench: Bench, apart: IsolatedWorker, name: str, data: bytes) -> str:
    plan = named(bench, f"forge rows:{name}", data, row=18)
    found = apart.execute(plan)
    assert isinstance(found, Analysed), found
    return type(apart.execute(bench.segment_plan(plan, found.shape, 0))).__name__


def few_pages(bench: Bench, apart: IsolatedWorker, data: bytes) -> str:
    """Return what comes of a plan after one of the same item whose pages were too few."""
    plan = named(bench, "look", data, row=19)
    found = apart.execute(plan)
    assert isinstance(found, Analysed), found
    segment = bench.segment_plan(plan, found.shape, 0)
    try:
        apart.execute(msgspec.structs.replace(segment, target=PageRun([], [])))
    except ValueError:
        return type(apart.execute(segment)).__name__
    return "no error"


def end_slowly(template: Template) -> int:
    """Return how many children the template keeps once one has ended that took long to, on a busy core, and no order follows."""
    pid, core = processes("template")[0], {min(os.sched_getaffinity(0))}
    children = Path(f"/proc/{pid}/task/{pid}/children")
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as loop:
        try:
            os.sched_setaffinity(loop.pid, core)
            for _ in range(8):
                decoder = template.fork()
                for child in map(int, children.read_text().split()):
                    with suppress(ProcessLookupError):
                        os.sched_setaffinity(child, core)
                        os.sched_setscheduler(child, os.SCHED_IDLE, os.sched_param(0))
                template.end(decoder)
                time.sleep(0.1)
        finally:
            loop.kill()
    until_s = time.monotonic() + 20
    while (found := len(children.read_text().split())) != 1 and time.monotonic() < until_s:
        time.sleep(0.01)
    return found


def begin_many(template: Template) -> int:
    """Return how many children the template had at most, while it forked and ended many without a pause."""
    pid, most = processes("template")[0], 0
    for _ in range(60):
        template.end(template.fork())
        most = max(most, len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return most


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    worker.load(MODEL)
    template = Template.begin(lambda channel: serve_item(channel, make_worker, lambda: None), memory_bytes=1 << 30)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mmrt-test-") as root:
        run = RunDirectory.create(Path(root) / "run", {})
        bench = Bench(run)
        shared = bench.worker

        def new(limit_s: float = LIMIT_S, cache_bytes: int = 1 << 28) -> IsolatedWorker:
            return IsolatedWorker(template, bench.media, bench.patch, cache_bytes, False, limit_s, 60.0)

        apart = new()
        workers = {"shared": shared, "process": apart}
        found["same"] = compare(bench, workers)
        found["same with kills"], found["kills"] = compare(bench, workers, kill=True), len(kills)
        png = media()["PNG"][1]

        def do(path: str, **more: Any) -> Result:
            result: Result = apart.execute(named(bench, path, png, **more))
            return result

        def said(path: str, **more: Any) -> Any:
            result = do(path, **more)
            assert isinstance(result, ItemError), result
            return json.loads(result.message.removeprefix(f"{path}: "))

        for row in (10, 11):  # each stays open
            assert isinstance(do("look", row=row), Analysed)
        found["seen by another"] = [said("spy", row=12), said("spy", row=10, item=1)]
        found["seen by the same"] = said("spy", row=10)
        assert settle(2) == 2  # one is open
        found["facts"] = facts(processes("decoder")[-1], run.path)
        found["attempts"] = said("attack", row=13)
        found["deaths"] = {name: type(do(f"deadly:{name}", row=14)).__name__ for name in DEADLY}
        found["exit"] = type(do("exit", row=15)).__name__
        try:
            do("raise", row=16)
        except isolated.DecoderError as error:
            found["raised"] = str(error).splitlines()[-1]
        apart.close()
        found["left"] = settle(1)
        apart = new(limit_s=1.0)
        found["hang"] = type(do("hang", row=17)).__name__
        found["forged"], found["seconds"] = {}, {}
        for name in (*(f"forge:{name}" for name in FORGED), "leave late"):
            began_s = time.monotonic()
            found["forged"][name] = type(do(name, row=18)).__name__
            found["seconds"][name] = time.monotonic() - began_s
        apart = new()
        found["forged rows"] = {name: forge_rows(bench, apart, name, png) for name in FORGED_ROWS}
        found["after too few pages"] = few_pages(bench, apart, png)
        found["left after forgery"] = settle(1)
        found["children"] = begin_many(template)
        found["children after a slow end"] = end_slowly(template)
        for row in range(20, 40):
            assert isinstance(do("look", row=row), Analysed)
        found["many"] = settle(isolated.MAX_KEPT + 1) - 1
        apart.close_unwanted(lambda plan: isinstance(plan, Analyse) and plan.row < 37)
        found["wanted"] = settle(4) - 1
        bench.worker = apart
        plan, shape = bench.analyse("image", png, row=41)
        for pid in processes("decoder"):
            os.kill(pid, signal.SIGKILL)
        found["again"] = len(bench.rows(plan, shape, 0)) == shape.segments[0].num_rows
        apart.close()
        run.destroy()
        shared.close()
    template.watch()
    print(json.dumps(found), flush=True)
    sys.stdin.readline()
    (killed,) = processes("template")
    os.kill(killed, signal.SIGKILL)
    time.sleep(30)


if __name__ == "__main__":
    main()
