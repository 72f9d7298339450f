"""The zygote: forks that belong to the supervisor, load code as it is now, and are ended with the run."""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from mmrt.runtime.supervisor.control import DownRequest
from mmrt.runtime.supervisor.launcher import Patience
from mmrt.runtime.supervisor.processes import Activity, activity, make_nicer
from mmrt.runtime.supervisor.zygote import Guard
from mmrt.shm.run_directory import RunDirectory

if TYPE_CHECKING:
    from .conftest import ToyRun

HERE = Path(__file__).parent
TIMEOUT_S = 40.0


@pytest.fixture
def forking(toy: "ToyRun") -> "ToyRun":
    """A run whose actors are forked: the toy's module lies beside its other files, so that a test can edit it."""
    shutil.copy(HERE / "toy_actor.py", toy.toys / "toy_actor.py")
    toy.environment = {"TOY_ENTRY": "toy_actor:main", "PYTHONPATH": str(toy.toys), "PYTHONDONTWRITEBYTECODE": "1"}
    return toy


def stat_field(pid: int, index: int) -> int:
    """Field of /proc/PID/stat, counted from the state (0)."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[index])


def pid_of(toy: "ToyRun", name: str) -> int:
    """The supervisor's child of this name, once it is there."""
    assert toy.process is not None
    until_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until_s:
        for pid in Path(f"/proc/{toy.process.pid}/task/{toy.process.pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text() == f"{name}\n" and Path(f"/proc/{pid}/cmdline").read_bytes():  # not ended
                    return int(pid)
        time.sleep(0.005)
    raise AssertionError(f"there is no {name}")


def zygote_pid(toy: "ToyRun") -> int:
    return pid_of(toy, "mmrt-zygote")


def spare_pid(toy: "ToyRun") -> int:
    """Of a spare that the zygote has said to be there: it has waited for the process between the two."""
    spare, zygote = pid_of(toy, "mmrt-spare"), zygote_pid(toy)
    deadline = time.monotonic() + TIMEOUT_S
    while Path(f"/proc/{zygote}/task/{zygote}/children").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return spare


def kill(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([pidfd], [], [], TIMEOUT_S)[0]
    os.close(pidfd)


def is_forked(pid: int) -> bool:
    return b"zygote" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_forks_are_the_supervisors_children(forking: "ToyRun") -> None:
    forking.start("memory", "decode")
    forking.wait_for("ready")
    assert forking.process is not None
    pid = forking.pid("decode")
    assert stat_field(pid, 1) == forking.process.pid, "the supervisor is the parent, to wait for it"
    assert stat_field(pid, 2) == pid, "a process group of its own"
    assert stat_field(pid, 3) == stat_field(forking.process.pid, 3), "the session is the supervisor's: niceness works inside one"
    assert Path(f"/proc/{pid}/comm").read_text() == "decode\n"
    assert b"zygote" in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert os.readlink(f"/proc/{pid}/fd/3").startswith("pipe:"), "the lifeline, where the zygote has its control socket"
    forking.call(DownRequest())
    assert forking.end() == 0
    forking.assert_nothing_left()


@pytest.mark.parametrize("kind", ["forked", "plain"])
def test_an_actor_gets_its_niceness_when_it_serves(forking: "ToyRun", kind: str) -> None:
    """What a death has taken is loaded as fast as its run may compute: on a busy machine a nicer process would wait for the others."""
    if kind == "plain":
        forking.environment.pop("TOY_ENTRY")
    forking.environment["TOY_NICE"] = "3"
    forking.behave("decode", "slow")
    os.mkfifo(forking.toys / "decode.go")
    forking.start("memory", "decode")
    forking.wait_for("lines", lambda event: event["lines"] == ["decode begins"])
    assert forking.process is not None
    pid, own = forking.pid("decode"), stat_field(forking.process.pid, 16)
    assert (b"zygote" in Path(f"/proc/{pid}/cmdline").read_bytes()) == (kind == "forked")
    assert stat_field(pid, 16) == own
    (forking.toys / "decode.go").write_text("")
    forking.wait_for("progress", lambda event: event["actor"] == "decode" and event["state"] == "active")
    assert stat_field(pid, 16) == min(own + 3, 19)


def test_all_threads_of_a_process_get_its_niceness() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    source = "import os, threading\nthreading.Thread(target=os.read, args=(0, 1)).start()\nprint(flush=True)\nos.read(0, 1)"
    process = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        assert process.stdout.readline()
        for nice in (2, 1):  # the second has no effect: only root could take it back
            make_nicer(process.pid, nice)
            tasks = [int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir()]
            assert [os.getpriority(os.PRIO_PROCESS, task) for task in tasks] == 2 * [min(own + 2, 19)]
        process.kill()
    process.wait()
    make_nicer(process.pid, 3)


def test_a_fork_loads_the_code_as_it_is_now(forking: "ToyRun") -> None:
    forking.start("memory", "decode")
    forking.wait_for("ready")
    module = forking.toys / "toy_actor.py"
    good = module.read_text()
    module.write_text(good.replace('print(f"{name} begins"', 'print(f"{name} was edited"'))
    assert forking.restart("decode").ok
    forking.wait_for("lines", lambda event: event["lines"] == ["decode was edited"])
    module.write_text("def main(name):\n    raise RuntimeError('broken edit')\n")
    reply = forking.restart("decode")
    assert not reply.ok
    assert reply.log[-1] == "RuntimeError: broken edit"
    assert forking.report().ready


def test_exit_status_of_a_fork_is_known(forking: "ToyRun") -> None:
    forking.behave("decode", "configuration")
    forking.start("memory", "decode")
    assert forking.wait_for("failed")["reason"].startswith("decode failed: exit status 2")
    assert forking.end() == 1


ONCE = """
import pathlib, time
words = pathlib.Path(__file__).with_name("imported")
if words.exists():
    time.sleep(1000)
words.touch()
"""


def test_a_spare_takes_the_place_of_a_killed_zygote(forking: "ToyRun") -> None:
    """At once, with all imports, again and again; and no actor notices. Here a new zygote would import for ever."""
    (forking.toys / "once.py").write_text(ONCE)
    forking.environment["TOY_MODULES"] = "once"
    forking.start("memory", "decode")
    forking.wait_for("ready")
    for number in range(3):
        zygote, spare, decode = zygote_pid(forking), spare_pid(forking), forking.pid("decode")
        forking.forget()
        kill(zygote)
        if number:
            kill(decode)
        else:
            assert forking.restart("decode").ok
        forking.wait_for("progress", lambda event: event["actor"] == "decode" and event["state"] == "active")
        assert is_forked(forking.pid("decode")) and forking.pid("decode") != decode
        assert zygote_pid(forking) == spare
    assert forking.actor("memory").restarts == 0
    forking.call(DownRequest())
    assert forking.end() == 0
    forking.assert_nothing_left()


def test_a_killed_spare_is_replaced(forking: "ToyRun") -> None:
    forking.start("memory", "decode")
    forking.wait_for("ready")
    zygote, spare = zygote_pid(forking), spare_pid(forking)
    kill(spare)
    assert spare_pid(forking) != spare and zygote_pid(forking) == zygote
    kill(zygote)
    kill(spare_pid(forking))
    assert forking.restart("decode").ok
    assert zygote_pid(forking) not in (zygote, spare)
    forking.call(DownRequest())
    assert forking.end() == 0
    forking.assert_nothing_left()


THREADED = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
ON_A_GPU = """
import sys, types
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: True))
"""


@pytest.mark.parametrize("source", [THREADED, ON_A_GPU], ids=["threads", "CUDA"])
def test_what_cannot_be_forked_is_not_and_actors_start_plainly(forking: "ToyRun", source: str) -> None:
    (forking.toys / "unfit.py").write_text(source)
    forking.environment["TOY_MODULES"] = "unfit"
    forking.start("memory", "decode")
    forking.wait_for("ready")
    assert b"zygote" not in Path(f"/proc/{forking.pid('decode')}/cmdline").read_bytes()
    forking.wait_for("message", lambda event: "starts without it" in event["text"])


def test_a_zygote_that_hangs_is_killed_when_it_is_needed(forking: "ToyRun") -> None:
    """SIGSTOP, which nobody notices until somebody dies: that one is forked by the spare."""
    forking.start("memory", "decode")
    forking.wait_for("ready")
    hung, spare = zygote_pid(forking), spare_pid(forking)
    gone = os.pidfd_open(hung)
    decode = forking.pid("decode")
    forking.forget()
    os.kill(hung, signal.SIGSTOP)
    os.kill(decode, signal.SIGKILL)
    forking.wait_for("message", lambda event: "the zygote hangs" in event["text"])
    assert select.select([gone], [], [], TIMEOUT_S)[0]
    os.close(gone)
    forking.wait_for("progress", lambda event: event["actor"] == "decode" and event["state"] == "active")
    assert is_forked(forking.pid("decode")) and zygote_pid(forking) == spare


@pytest.mark.parametrize(
    ("looks", "is_hung"),
    [
        ([(0.0, True, 10.0), (100.0, True, 10.5), (200.0, True, 11.0)], False),  # on a busy machine: it waits for a processor
        ([(0.0, False, 10.0), (4.9, False, 10.0)], False),
        ([(0.0, False, 10.0), (4.9, False, 10.0), (5.1, False, 10.0)], True),  # stopped, or waiting for nothing
        ([(0.0, True, 10.0), (50.0, True, 12.0), (54.0, False, 12.0)], False),
        ([(0.0, True, 10.0), (50.0, True, 12.0), (55.1, False, 12.0)], True),
        ([(0.0, True, 10.0), (50.0, True, 15.1)], True),  # in an endless loop
    ],
)
def test_a_zygote_is_judged_by_what_it_does_and_not_by_the_clock(looks: list[tuple[float, bool, float]], is_hung: bool) -> None:
    patience = Patience(looks[0][0], looks[0][2])
    assert [patience.is_over(now_s, Activity(used_s, wants), 5.0) for now_s, wants, used_s in looks][-1] == is_hung


def wait_for_activity(pid: int, condition: Callable[[Activity], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while (seen := activity(pid)) is None or not condition(seen):
        assert time.monotonic() < deadline, seen
        time.sleep(0.01)


def test_what_a_process_does_is_seen() -> None:
    """In a child of it, too, as a fork that is under way is one."""
    busy = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"]
    )
    try:
        wait_for_activity(busy.pid, lambda seen: seen.wants_processor and seen.used_s > 0.2)
        os.kill(busy.pid, signal.SIGSTOP)
        (child,) = map(int, Path(f"/proc/{busy.pid}/task/{busy.pid}/children").read_text().split())
        os.kill(child, signal.SIGSTOP)
        wait_for_activity(busy.pid, lambda seen: not seen.wants_processor)
        os.kill(child, signal.SIGKILL)
    finally:
        busy.kill()
        busy.wait()
    assert activity(busy.pid) is None


def begun(order: list[str]) -> int:
    """The place of the event of the next start, which may have ended before anybody says that it has begun."""
    return next(number for number, text in enumerate(order) if text in ("starting", "standby", "active"))


DIES_UNHEARD = """
import os, pathlib, signal, socket, sys
send = socket.socket.send
def die_once(self, packet):
    words = pathlib.Path(__file__).with_name("dies")
    if "mmrt.runtime.supervisor.zygote" in sys.orig_argv and b'Forked' in packet and words.exists():
        words.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return send(self, packet)
socket.socket.send = die_once
"""


def test_what_a_zygote_forks_and_dies_before_it_says_so_is_killed_first(forking: "ToyRun") -> None:
    """It would take the role, and be replaced a second time."""
    forking.toys.joinpath("sitecustomize.py").write_text(DIES_UNHEARD)
    forking.start("memory", "decode")
    forking.wait_for("ready")
    spare = spare_pid(forking)
    forking.toys.joinpath("dies").touch()
    forking.forget()
    os.kill(forking.pid("decode"), signal.SIGKILL)
    forking.wait_for("message", lambda event: "the zygote died: its spare takes over" in event["text"])
    forking.wait_for("message", lambda event: "killed orphan process" in event["text"])
    forking.wait_for("progress", lambda event: event["actor"] == "decode" and event["state"] == "active")
    order = [event.get("text") or event.get("state", "") for event in forking.events]
    killed = next(number for number, text in enumerate(order) if "killed orphan process" in text)
    assert killed < begun(order) and zygote_pid(forking) == spare
    assert sum("killed orphan process" in event.get("text", "") for event in forking.events) == 1
    forking.call(DownRequest())
    assert forking.end() == 0
    forking.assert_nothing_left()


ENDS_SLOWLY = """
import ctypes, os, pathlib, platform, signal, sys, time, _thread
exit, wait, words = os._exit, os.waitpid, pathlib.Path(__file__).with_name("dies")
def end_slowly(status):
    if "mmrt.runtime.supervisor.zygote" in sys.orig_argv and words.exists():
        _thread.start_new_thread(lambda: (time.sleep(0.3), exit(status)), ())
        ctypes.CDLL(None).syscall(93 if platform.machine() == "aarch64" else 60, 0)  # exit: this thread alone
    exit(status)
def die_first(pid, options):
    if "mmrt.runtime.supervisor.zygote" in sys.orig_argv and words.exists():
        while pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
            time.sleep(0.001)
        words.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return wait(pid, options)
os._exit, os.waitpid = end_slowly, die_first
"""


def test_a_fork_whose_parent_is_still_ending_is_killed_first(forking: "ToyRun") -> None:
    """The zygote dies between the two steps of a fork. The first fork has no memory any more, but keeps the second until its end."""
    forking.toys.joinpath("sitecustomize.py").write_text(ENDS_SLOWLY)
    forking.start("memory", "decode")
    forking.wait_for("ready")
    spare = spare_pid(forking)
    forking.toys.joinpath("dies").touch()
    forking.forget()
    os.kill(forking.pid("decode"), signal.SIGKILL)
    forking.wait_for("message", lambda event: "the zygote died: its spare takes over" in event["text"])
    forking.wait_for("progress", lambda event: event["actor"] == "decode" and event["state"] == "active")
    order = [event.get("text") or event.get("state", "") for event in forking.events]
    assert [number for number, text in enumerate(order[: begun(order)]) if "killed orphan process" in text]
    assert zygote_pid(forking) == spare
    forking.call(DownRequest())
    assert forking.end() == 0
    forking.assert_nothing_left()


def test_what_an_actor_leaves_behind_is_killed(forking: "ToyRun") -> None:
    """It becomes the supervisor's child, as does what a zygote forks and dies before it can say so."""
    forking.toys.joinpath("decode").write_text("parent")
    forking.start("memory", "decode")
    forking.wait_for("ready")
    decode = forking.pid("decode")
    (child,) = Path(f"/proc/{decode}/task/{decode}/children").read_text().split()
    gone = os.pidfd_open(int(child))
    forking.toys.joinpath("decode").write_text("")
    os.kill(decode, signal.SIGKILL)
    forking.wait_for("message", lambda event: f"killed orphan process {child}" in event["text"])
    assert select.select([gone], [], [], TIMEOUT_S)[0]
    os.close(gone)


def test_the_environment_need_not_be_utf8(forking: "ToyRun") -> None:
    forking.environment |= {"ODD": os.fsdecode(b"\xff=\xfe"), "EMPTY": ""}
    forking.toys.joinpath("decode").write_text("parent")
    forking.start("memory", "decode")
    forking.wait_for("ready")
    decode = forking.pid("decode")
    (child,) = Path(f"/proc/{decode}/task/{decode}/children").read_text().split()
    assert b"zygote" in Path(f"/proc/{decode}/cmdline").read_bytes()
    assert {b"ODD=\xff=\xfe", b"EMPTY="} <= set(Path(f"/proc/{child}/environ").read_bytes().split(b"\0"))
    os.kill(int(child), signal.SIGKILL)  # the fixture kills the supervisor, which would have


def test_a_module_that_cannot_be_imported_is_the_actors_to_report(forking: "ToyRun") -> None:
    forking.environment["TOY_MODULES"] = "no_such_module"
    forking.start("memory", "decode")
    forking.wait_for("ready")
    assert b"zygote" in Path(f"/proc/{forking.pid('decode')}/cmdline").read_bytes()


TORCH = """
from torch import _meta_registrations
class cuda:
    is_initialized = staticmethod(lambda: False)
open("{seen}", "w").close()
"""


def test_torch_is_imported_without_what_only_compilers_need(forking: "ToyRun") -> None:
    """Here torch has the needless part, by the name that the zygote knows; there it has not."""
    assert sys.modules["torch._meta_registrations"].__file__
    part = forking.toys / "torch"
    part.mkdir()
    (part / "__init__.py").write_text(TORCH.format(seen=part / "seen"))
    (part / "_meta_registrations.py").write_text("import no_such_module")
    forking.environment["TOY_MODULES"] = "torch"
    forking.start("memory", "decode")
    forking.wait_for("ready")
    assert (part / "seen").exists()


def test_a_killed_supervisor_leaves_nothing(forking: "ToyRun") -> None:
    forking.start("memory", "decode")
    forking.wait_for("ready")
    assert forking.process is not None
    ends = [os.pidfd_open(pid) for pid in (zygote_pid(forking), spare_pid(forking))]
    forking.process.kill()
    forking.process.wait()
    for end in ends:
        assert select.select([end], [], [], TIMEOUT_S)[0]
        os.close(end)
    forking.assert_nothing_left()


def test_the_guardian_kills_what_does_not_end_and_sweeps() -> None:
    """The supervisor dies by kill -9 while an actor is stopped and will not notice."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mmrt-guard-") as root:
        path = Path(root) / "run"
        RunDirectory.create(path, {}).close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "mmrt.runtime.supervisor.zygote", "--grace", "0.1", "--run", str(path)]
        zygote = subprocess.Popen([*command, "--control-fd", str(theirs.fileno())], pass_fds=[theirs.fileno()])
        deaf = subprocess.Popen(["sleep", "1000"])
        deaf.send_signal(signal.SIGSTOP)
        with ours, theirs:
            pidfd = os.pidfd_open(deaf.pid)
            socket.send_fds(ours, [msgspec.msgpack.encode(Guard(deaf.pid))], [pidfd])
            os.close(pidfd)
        assert deaf.wait(TIMEOUT_S) == -signal.SIGKILL
        assert zygote.wait(TIMEOUT_S) == 0
        assert not path.exists()
