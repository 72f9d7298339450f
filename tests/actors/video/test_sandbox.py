"""What the video process cannot do any more, tried in a real process, and what it still can."""

import errno
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mmrt.actors.host import seccomp
from mmrt.actors.host.actor import Ending
from mmrt.actors.video import worker
from mmrt.runtime.bus.messages import MediaItem, PageRun, Welcome
from mmrt.runtime.bus.plans import Analyse
from mmrt.runtime.bus.transport import ControllerSocket
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.process.notify import NotifyListener
from mmrt.runtime.process.processors import Processors, plan_threads
from mmrt.shm.confined import own_ids
from mmrt.shm.pool import PagePool
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.actors.video.test_worker import MODEL
from mmrt.tests.media.conftest import encode_video

SCRIPT = Path(__file__).with_name("sandboxed.py")


class Outcome(NamedTuple):
    pid: int
    walls: str
    status: int
    warnings: str
    found: dict[str, Any]
    left: list[str]  # files where it ran


@pytest.fixture(scope="module", params=["all", "landlock"])
def outcome(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Outcome]:
    """One process that enters the sandbox, tries everything and ends in a crash; and one without namespaces and an id of its own."""
    folder = tmp_path_factory.mktemp("sandbox")
    for name in ("run/notes", "elsewhere/empty", "cwd"):
        (folder / name).mkdir(parents=True)
    for name in ("elsewhere/old", "run/secret", "run/notes/note"):
        (folder / name).write_text(name)
    (folder / "video.mp4").write_bytes(encode_video(options={"bf": "2"}))
    listener = NotifyListener(folder / "run" / "notify")
    controller = ControllerSocket(folder / "run")
    arguments = [folder / "run", folder / "elsewhere", folder / "video.mp4", request.param]
    child = subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, arguments)],
        cwd=folder / "cwd",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while child.poll() is None and not (heard := controller.receive()):
        time.sleep(0.01)
    controller.send("video", 1, Welcome(1))
    output, errors = child.communicate(timeout=30)
    controller.close()
    noted = [notification.actor for notification in listener.drain()]
    listener.close()
    assert output, errors
    assert ([actor for actor, _, _ in heard], noted) == (["video"], ["video"])
    walls = request.param
    yield Outcome(child.pid, walls, child.returncode, errors, json.loads(output), [file.name for file in (folder / "cwd").iterdir()])


def needs(outcome: Outcome, what: str) -> None:
    if what in outcome.warnings:
        pytest.skip(f"not restricted here: {outcome.warnings}")


def forbidden(outcome: Outcome, *names: str) -> set[str]:
    return {outcome.found["forbidden"][name] for name in names}


def test_no_network_no_programs_no_other_processes(outcome: Outcome) -> None:
    needs(outcome, "system calls")
    network, programs = ("connect", "udp", "netlink", "bind", "abstract"), ("fork", "subprocess", "posix_spawn")
    assert forbidden(outcome, *network, *programs, "niceness of others", "pidfd", "file in memory") == {"EPERM"}
    assert outcome.found["deaths"] == dict.fromkeys(outcome.found["deaths"], "SIGSYS")


def answer(number: int, *arguments: int, machine: int = seccomp._AUDIT_ARCH_X86_64, **more: bool) -> str:
    """What the filter says to a system call: its program, interpreted."""
    data = struct.pack("=IIQ6Q", number, machine, 0, *arguments, *(6 - len(arguments)) * [0])
    program, at, word = list(seccomp._program(PID, **more)), 0, 0
    while True:
        code, k, yes, no = program[at]
        at += 1
        if code == seccomp._LOAD:
            (word,) = struct.unpack_from("=I", data, k)
        elif code == seccomp._AND:
            word &= k
        elif code == seccomp._RETURN:
            return "done" if k == seccomp._ALLOW else "SIGSYS" if k == seccomp._KILL_PROCESS else errno.errorcode[k & 0xFFFF]
        else:
            passes = {seccomp._JUMP_EQUAL: word == k, seccomp._JUMP_AT_LEAST: word >= k, seccomp._JUMP_BITS: bool(word & k)}[code]
            at += yes if passes else no


PID, FAR = 77, 1 << 32
JUDGED: dict[str, tuple[int, tuple[int, ...] | None, tuple[int, ...], str]] = {  # number, what is done, what is not, the answer to that
    "mmap": (9, (0, 1, 3, 0x22), (0, 1, 3, 0x21), "EPERM"),
    "mmap of a stack": (9, (0, 1, 3, 0x20022), (0, 1, 3, 0x122), "EPERM"),
    "mmap of huge pages": (9, (0, 1, 3, 0x4022), (0, 1, 3, 0x40022), "EPERM"),
    "ioctl": (16, (0, 0x5401), (0, 0x5412), "SIGSYS"),
    "ioctl of files": (16, (0, 0x5451), (0, 0x40086602), "EPERM"),
    "madvise": (28, (0, 1, 4), (0, 1, 9), "SIGSYS"),
    "socket": (41, None, (1,), "EPERM"),
    "sendto": (44, (3, 1, 1, 0, 0, 0), (3, 1, 1, 0, FAR, 0), "SIGSYS"),
    "clone": (56, (0x10000,), (17,), "EPERM"),
    "kill": (62, (PID, 9), (1, 9), "SIGSYS"),
    "fcntl": (72, (0, 3), (0, 8), "SIGSYS"),
    "fcntl of leases": (72, (0, 1030), (0, 1024), "EPERM"),
    "sched_setscheduler": (144, (1, 0), (1, 5), "EPERM"),
    "tgkill": (234, (PID, 1, 9), (1, 1, 9), "SIGSYS"),
    "prlimit64": (302, (0, 0), (1, 0), "SIGSYS"),
    "clone3": (435, None, (), "ENOSYS"),
}


def test_every_system_call_kills_but_those_that_are_needed_or_tried() -> None:
    judged = {number for number, *_ in JUDGED.values()}
    for number, good, bad, refusal in JUDGED.values():
        assert good is None or answer(number, *good) == "done"
        assert answer(number, *bad) == refusal
    expected = dict.fromkeys(range(600), "SIGSYS") | dict.fromkeys(range(seccomp._FIRST_UNKNOWN, 600), "ENOSYS")
    expected |= dict.fromkeys(seccomp._ALLOWED.values(), "done") | dict.fromkeys(seccomp._REFUSED.values(), "EPERM")
    assert {number: answer(number) for number in expected if number not in judged} == {
        number: said for number, said in expected.items() if number not in judged
    }
    assert answer(0, machine=3) == answer(seccomp._X32) == "SIGSYS"  # the interfaces of 32 bits have other numbers


def test_a_process_that_fetches_has_the_network_besides() -> None:
    answers = {number: answer(number, network=True) for number in range(seccomp._FIRST_UNKNOWN)}
    more = {*seccomp._NETWORK_NEEDS.values(), seccomp._SENDTO, seccomp._SOCKETPAIR}
    assert {number for number in answers if answers[number] == "done"} == {n for n in answers if answer(n) == "done"} | more
    assert {answers[number] for number in (57, 59, 101, 424)} == {"EPERM"}  # fork, execve, ptrace, pidfd_send_signal
    families = {family: answer(41, family, network=True) for family in (1, 2, 10, 16, 17, 40)}
    assert families == {1: "EPERM", 2: "done", 10: "done", 16: "done", 17: "EPERM", 40: "EPERM"}
    pairs = [answer(53, 1, kind | 0x80800, network=True) for kind in range(1, 6)]  # SOCK_CLOEXEC, SOCK_NONBLOCK
    assert pairs == ["done", *["EPERM"] * 4], "of streams alone: any other can send to a socket that has a name"
    assert (answer(62, 1, 9, network=True), answer(16, 0, 0x5412, network=True)) == ("SIGSYS", "SIGSYS")


def test_a_template_of_decoders_can_fork_besides_and_give_no_namespaces() -> None:
    answers = {number: answer(number, forks=True) for number in range(seccomp._FIRST_UNKNOWN)}
    more = {56, *seccomp._FORK_NEEDS.values()}  # clone
    assert {number for number in answers if answers[number] == "done"} == {n for n in answers if answer(n) == "done"} | more
    fork, thread = 0x1200000 | 17, 0x3D0F00
    assert (answer(56, fork, forks=True), answer(56, thread, forks=True), answer(56, fork)) == ("done", "done", "EPERM")
    spaces = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
    assert {answer(56, fork | space, forks=True) for space in spaces} == {"EPERM"}
    assert {answer(number, forks=True) for number in (59, 101, 425, 310)} == {"SIGSYS"}


NO_NAMESPACE_OF_PROCESSES = """
import os
from mmrt.actors.video import sandbox
unshare = sandbox._unshare
def refuse(more=0):
    if more:
        raise PermissionError(1, "no namespace of processes")
    unshare()
sandbox._unshare = refuse
forker = sandbox.prepare_forker()
print(forker.pid == os.getpid(), forker.problem or "none", forker.processes_problem, flush=True)
if os.fork() == 0:
    print(sandbox.enter_sandbox(memory_bytes=1 << 28, file_bytes=100, forker=forker) or "none", os.getpid() != 1, flush=True)
    if os.fork() == 0:
        sandbox.enter_as_child(1 << 28)
        print(sandbox.memory_left() == 1 << 28, flush=True)
        os.fork()
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
os.wait()
"""


def test_one_that_forks_does_so_without_a_namespace_of_processes_too(outcome: Outcome) -> None:
    needs(outcome, "system calls")
    if outcome.found["problem"]:
        pytest.skip(outcome.found["problem"])
    done = child(NO_NAMESPACE_OF_PROCESSES)
    assert done.stdout.splitlines() == ["True none no namespace of processes", "none True", "True"]
    assert "PermissionError: [Errno 1]" in done.stderr


SYSTEM_CALLS = """
import errno, os, signal, sys
from mmrt.actors.host import landlock, seccomp
from mmrt.actors.video import sandbox
sandbox._renounce_new_privileges()
for number in map(int, sys.argv[1:]):
    pid = os.fork()
    if not pid:
        seccomp.forbid_system_calls()
        try:
            landlock.system_call(number, -1, -1, -1)
        except OSError as error:
            os._exit(error.errno)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(number, signal.Signals(-status).name if status < 0 else errno.errorcode.get(status, status))
"""


def test_the_kernel_reads_the_filter_so(outcome: Outcome) -> None:
    needs(outcome, "system calls")
    expected = dict.fromkeys((42, 59, 101, 165, 446), "SIGSYS") | {41: "EPERM", 319: "EPERM", 435: "ENOSYS", 999: "ENOSYS"}
    found = child(SYSTEM_CALLS, *map(str, expected)).stdout.split()
    assert dict(zip(map(int, found[::2]), found[1::2], strict=True)) == expected


@pytest.mark.parametrize(
    ("what", "since", "error"),
    [("memory of others", 1, "EACCES"), ("environment of others", 1, "EACCES")],
)
def test_landlock_keeps_what_belongs_to_others(outcome: Outcome, what: str, since: int, error: str) -> None:
    if outcome.found["landlock"] < since:
        pytest.skip(f"Landlock is of version {outcome.found['landlock']} here, and this needs {since}")
    assert outcome.found["forbidden"][what] in (error, no_file(outcome))


def no_file(outcome: Outcome) -> str:
    """The answer to each attempt to open a file."""
    return "EACCES" if outcome.walls == "landlock" or outcome.found["problem"] else "ENOENT"


def test_no_file_can_be_read(outcome: Outcome) -> None:
    needs(outcome, "what it reads and writes")
    what = ("read", "home", "terminals", "other processes", "own memory", "code", "programs", "null")
    assert forbidden(outcome, *what) == {no_file(outcome)}
    assert forbidden(outcome, "list") == {no_file(outcome)} and forbidden(outcome, "working directory") == {"EACCES"}
    assert forbidden(outcome, "import") <= {"ModuleNotFoundError", "EACCES"}


def test_it_has_a_user_of_its_own_if_that_was_root(outcome: Outcome) -> None:
    if os.getuid() or outcome.walls != "all":
        pytest.skip("only root can give it one")
    needs(outcome, "its user id")
    assert len(set(outcome.found["ids"])) == 1 and outcome.found["ids"][0] in own_ids(outcome.pid)


READS_CODE = """
import os
from mmrt.actors.video import sandbox
print(sandbox.enter_sandbox(memory_bytes=1 << 28, file_bytes=100, reads_code=True))
import colorsys
open(sandbox.__file__).close()
print(sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")))
open("/etc/hostname")
"""


def test_one_that_reads_code_keeps_what_the_kernel_tells(outcome: Outcome) -> None:
    """A rule is for an inode. Those of /proc are made anew when memory is short, unless somebody has them open."""
    needs(outcome, "what it reads and writes")
    done = child(READS_CODE)
    assert "'/proc/vmstat'" in done.stdout and "'/proc/meminfo'" in done.stdout, done.stderr
    assert "Permission denied: '/etc/hostname'" in done.stderr


def test_a_working_directory_that_is_gone_opens_nothing(outcome: Outcome, tmp_path: Path) -> None:
    needs(outcome, "what it reads and writes")
    code = f"""
import errno, os
from pathlib import Path
from mmrt.actors.video.sandbox import enter_sandbox
here = Path({str(tmp_path)!r})
(here / "gone").mkdir()
os.chdir(here / "gone")
(here / "gone").rmdir()
enter_sandbox(memory_bytes=1 << 28, file_bytes=100)
try:
    os.listdir(here)
except OSError as error:
    print(errno.errorcode[error.errno])
"""
    assert child(code).stdout in ("EACCES\n", "ENOENT\n")


CUDA_DRIVER = """
import errno, os, socket, sys
from pathlib import Path
from mmrt.actors.video.sandbox import enter_sandbox
run = Path(sys.argv[1])
enter_sandbox(memory_bytes=1 << 28, file_bytes=100, reads_code=True, cuda=sys.argv[2] == "cuda")
def attempt(action):
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
abstract, named = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), socket.socket(socket.AF_UNIX)
print(attempt(lambda: abstract.bind(chr(0) + "mmrt-test-" + run.name)), attempt(abstract.listen))
print(attempt(lambda: named.bind(str(run / "socket"))), attempt(Path("/proc/modules").read_bytes), flush=True)
print(attempt(lambda: named.connect(str(run / "other"))), attempt(lambda: os.execv("/bin/true", ["true"])))
"""


def test_cuda_may_listen_on_an_abstract_socket_and_connects_to_nobody(outcome: Outcome, tmp_path: Path) -> None:
    """As libcuda does when it starts; where bind or listen is refused it does not."""
    needs(outcome, "system calls")
    needs(outcome, "what it reads and writes")
    modules = "done" if Path("/proc/modules").exists() else "ENOENT"
    done = child(CUDA_DRIVER, str(tmp_path), "cuda")
    assert done.stdout == f"done done\nEACCES {modules}\nEPERM EPERM\n", done.stderr
    assert "PermissionError" in child(CUDA_DRIVER, str(tmp_path), "cpu").stderr


@pytest.mark.gpu
def test_cuda_starts_in_it() -> None:
    code = """
import torch
from mmrt.actors.video.sandbox import enter_sandbox
enter_sandbox(memory_bytes=8 << 30, file_bytes=100, reads_code=True, cuda=True)
torch.cuda.init()
print(float(torch.ones(4, device="cuda").sum()))
"""
    assert child(code).stdout == "4.0\n"


def test_no_file_can_be_written_or_removed(outcome: Outcome) -> None:
    needs(outcome, "what it reads and writes")
    run = ("write in the run", "write a note", "list the run", "read in the run")
    assert forbidden(outcome, "write", "overwrite", *run) == {no_file(outcome)}
    needs(outcome, "system calls")
    names = ("remove", "rmdir", "mkdir", "remove in the run", "link", "truncate", "chmod", "chown", "utime", "attribute")
    assert forbidden(outcome, *names) == {"EPERM"}


def test_limits(outcome: Outcome) -> None:
    found = outcome.found["forbidden"]
    assert (found["large file"], found["memory"], found["core"]) == ("EFBIG", "MemoryError", "ValueError")
    assert found["memory without a limit"] == found["memory as a stack"] == "EPERM"
    assert found["a large stack"] == "ValueError"
    assert 0 < outcome.found["memory left"] <= 512 << 20


def test_threads_that_begin_later_are_restricted_too(outcome: Outcome) -> None:
    needs(outcome, "system calls")
    found = outcome.found["in a thread"]
    assert (found["connect"], found["fork"]) == ("EPERM", "EPERM")
    needs(outcome, "what it reads and writes")
    assert found["write"] == no_file(outcome)


def test_what_the_actor_needs_goes_on(outcome: Outcome) -> None:
    assert outcome.found["allowed"] == dict.fromkeys(outcome.found["allowed"], "done")


def test_no_privileges_are_left(outcome: Outcome) -> None:
    status = dict(line.split(":\t", 1) for line in outcome.found["status"].splitlines() if ":\t" in line)
    assert status["NoNewPrivs"] == "1"
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}


def test_a_crash_leaves_no_core(outcome: Outcome) -> None:
    assert outcome.status == -signal.SIGSEGV
    assert outcome.found["core"] in ([1, 1], [0, 0])
    assert not outcome.left


def child(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=30)


NAMESPACES = """
import os, resource, sys
from mmrt.actors.video.sandbox import MAX_THREADS, enter_sandbox
if sys.argv[1] == "user" and os.getuid() == 0:
    os.setresuid(1000, 1000, 1000)
problem = enter_sandbox(memory_bytes=1 << 28, file_bytes=100)
print(problem, resource.getrlimit(resource.RLIMIT_NPROC)[1] <= MAX_THREADS, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("user", ["as it is", "user"])
def test_it_has_namespaces_of_its_own_without_a_right_in_them(user: str) -> None:
    command = [sys.executable, "-c", NAMESPACES, user]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        *problem, is_limited = process.stdout.readline().split()
        own = [kind for kind in ("user", "net", "ipc", "uts", "mnt", "pid") if namespace(process.pid, kind) != namespace(0, kind)]
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.stdin.close()
    if problem:
        pytest.skip(" ".join(problem))
    by_root = user == "as it is" and os.getuid() == 0
    assert (own, is_limited) == ([*([] if by_root else ["user"]), "net", "ipc", "uts", "mnt"], "True")
    assert f"CapEff:\t{'0' * 16}" in status


def namespace(pid: int, kind: str) -> str:
    return os.readlink(f"/proc/{pid or 'self'}/ns/{kind}")


def test_cpu_time_ends_the_process_unless_it_is_granted_again() -> None:
    code = """
from mmrt.actors.video.sandbox import allow_cpu_time
import time
allow_cpu_time(0.1)
allow_cpu_time(1.1)
def compute(until_s):
    while time.process_time() < until_s: pass
compute(1.5)
print("granted", flush=True)
allow_cpu_time(0)
compute(9)
"""
    done = child(code)
    assert (done.returncode, done.stdout) == (-signal.SIGXCPU, "granted\n")


def test_where_the_kernel_refuses_one_line_says_so_and_the_rest_holds(tmp_path: Path) -> None:
    code = f"""
import errno, logging, os, platform, sys
from pathlib import Path
from mmrt.actors.video import sandbox
logging.basicConfig(stream=sys.stdout, format="%(message)s")
platform.machine = lambda: "pdp11"
def refuse(*paths): raise OSError(errno.EOPNOTSUPP, "no Landlock")
sandbox.confine_to_files = refuse
sandbox._take_own_id = refuse
sandbox._enter_namespaces = lambda: "no namespaces"
print(sandbox.enter_sandbox(memory_bytes=1 << 28, file_bytes=100))
try:
    (Path({str(tmp_path)!r}) / "file").write_bytes(bytes(101))
except OSError as error:
    print(errno.errorcode[error.errno])
"""
    said = "media are decoded with more rights than needed: this system does not restrict"
    lacks = "its user id (no Landlock), what it reads and writes (no Landlock), system calls (there is no filter for pdp11)"
    expected = [f"{said} {lacks}", "no namespaces", "EFBIG"]
    assert child(code).stdout.splitlines() == expected


calls: list[tuple[object, ...]] = []


class Actor:
    """As much of an actor as ``main`` uses before it serves."""

    name = "video"
    session = None
    config = plan_threads(RuntimeConfig(), Processors(1, 1))
    model = MODEL

    def __init__(self, run: RunDirectory, follows_a_death: bool) -> None:
        self.run = run
        self.follows_a_death = follows_a_death

    def wait_for_layout(self) -> None:
        pass

    def share_cores(self) -> None:
        pass

    def hold_connections(self) -> None:
        calls.append(("hold",))


@pytest.mark.parametrize("follows_a_death", [False, True])
def test_the_actor_enters_it_before_its_first_plan_and_ends_its_threads_after_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, follows_a_death: bool
) -> None:
    run = RunDirectory.create(tmp_path / "run", {})
    for name in ("media", "patch"):
        PagePool.create(run, name, 2, 4096)
    calls.clear()

    class Worker:
        def __init__(self, media: PagePool, patches: PagePool, _: object, __: object, cache_bytes: int, *more: object) -> None:
            assert (media.data.flags.writeable, patches.data.flags.writeable) == (False, True)
            assert not patches.generations.flags.writeable and not patches._keys.flags.writeable
            self.name = "small" if cache_bytes == worker.CACHE_BYTES else "large"
            assert more[-1] is (self.name == "small")

        def close_unwanted(self, is_unwanted: object) -> None:
            calls.append(("close unwanted",))

        def execute(self, plan: object, alone: bool) -> object:
            calls.append(("execute", self.name, alone))
            return "result"

        def close(self) -> None:
            calls.append(("close", self.name))

    small, large = (Analyse(0, 1, 0, MediaItem(kind, 10), PageRun([], [])) for kind in ("image", "video"))

    class Plans:
        def __init__(self, actor: Actor, rows: object) -> None:
            calls.append(("active",))

        def prepare_captures(self, pools: object) -> None:
            assert pools == ("media", "patch")

        def serve(self, execute: Callable[[object], object], is_aside: Callable[[object], bool]) -> None:
            assert (is_aside(small), is_aside(large)) == (False, not follows_a_death)
            assert [execute(small), execute(large)] == ["result", "result"]
            assert (is_aside(small), is_aside(large)) == (False, True)
            raise Ending

    monkeypatch.setattr(worker, "CAUTIOUS_PLANS", 1)
    monkeypatch.setattr(worker, "VideoWorker", Worker)
    monkeypatch.setattr(worker, "PlanLoop", Plans)
    monkeypatch.setattr(worker.SequenceTable, "attach", lambda *_, **__: None)
    monkeypatch.setattr(worker, "enter_sandbox", lambda **limits: calls.append(("sandbox", limits)) or "")
    monkeypatch.setattr(worker, "allow_cpu_time", lambda seconds: calls.append(("cpu", seconds)))
    monkeypatch.setattr(worker.os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(Ending):
        worker.main(Actor(run, follows_a_death))  # type: ignore[arg-type]
    run.destroy()
    active, held, entered, *rest = calls
    assert (active[0], held[0], entered[0]) == ("active", "hold", "sandbox")
    limits: dict[str, Any] = entered[1]  # type: ignore[assignment]
    assert not limits["reads_code"] and not limits["cuda"]
    assert limits["memory_bytes"] > 2 * worker.CACHE_BYTES and limits["file_bytes"] > 3 * 2 * 4096
    each = [("cpu", 360.0), ("close unwanted",)]
    done = [*each, ("execute", "small", follows_a_death), *each, ("execute", "large", False)]
    assert rest == [*done, ("close", "large"), ("close", "small")]
