"""``mmrt up -d``: a supervisor in the background, and a foreground process that waits until the run is ready or has failed.

The two talk over a pipe: JSON lines, one for each event that a ``Reporter`` is told. After ``Ready`` nothing reads it any more.
"""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path

import msgspec

from ..runtime.errors import RunError, UserError
from ..runtime.supervisor.supervisor import Reporter
from ..shm.errors import ShmError


class Started(msgspec.Struct, frozen=True, tag=True):
    pid: int


class Progress(msgspec.Struct, frozen=True, tag=True):
    actor: str
    state: str
    status: str


class Message(msgspec.Struct, frozen=True, tag=True):
    text: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    endpoint: str
    page: str
    seconds: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    reason: str
    tail: list[str]


Report = Started | Progress | Message | Ready | Failed
_decode = msgspec.json.Decoder(Report).decode


class PipeReporter:
    """The Reporter of a detached supervisor: tells the waiting process until the run is ready, the log files always."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def lines(self, actor: str, lines: Sequence[str]) -> None:
        pass

    def progress(self, actor: str, state: str, status: str) -> None:
        self._send(Progress(actor, state, status))

    def message(self, text: str) -> None:
        self._send(Message(text))

    def ready(self, endpoint: str, page: str, seconds: float) -> None:
        self._send(Ready(endpoint, page, seconds))
        self.close()

    def failed(self, reason: str, tail: Sequence[str]) -> None:
        self._send(Failed(reason, list(tail)))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _send(self, report: Report) -> None:
        if self._fd >= 0:
            try:
                os.write(self._fd, msgspec.json.encode(report) + b"\n")
            except OSError:
                self.close()


def detach(supervise: Callable[[PipeReporter], int], log_file: Path, reporter: Reporter) -> int:
    """Run ``supervise`` in a daemon and wait until it is ready. Returns 0 then, or the exit status of a run that failed.

    Must be called while this process has one thread. ``log_file`` gets the daemon's own output, such as a traceback.

    Raises: RunError if it cannot be written.
    """
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RunError(f"cannot write {log_file}: {error.strerror} (XDG_STATE_HOME says where logs go)") from None
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read_end)
            status = _become_daemon(supervise, write_end, log)
        finally:
            os._exit(status)
    os.close(write_end)
    os.close(log)
    os.waitpid(child, 0)
    return _wait(read_end, log_file, reporter)


def make_imports_absolute(environ: MutableMapping[str, str]) -> None:
    """Name the directories of PYTHONPATH as seen from here: processes that the daemon starts work in another one."""
    if path := environ.get("PYTHONPATH"):
        environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))


def _become_daemon(supervise: Callable[[PipeReporter], int], fd: int, log: int) -> int:
    """In the child: one session of its own for the whole run (niceness works only inside one), then the daemon proper."""
    os.setsid()
    if os.fork():
        return 0
    make_imports_absolute(os.environ)
    os.chdir("/")
    os.umask(0o077)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _close_all_but(fd)
    pipe = PipeReporter(fd)
    os.write(fd, msgspec.json.encode(Started(os.getpid())) + b"\n")
    try:
        return supervise(pipe)
    except (UserError, ShmError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        pipe.failed(str(error), [])
        return int(getattr(error, "exit_code", 1))
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        raise


def _close_all_but(fd: int) -> None:
    """Close every descriptor but the standard ones and ``fd``: what the caller let us inherit, such as a lock, must not live as long
    as the run. Nothing is lost: the supervisor opens its own sockets, and a notify socket is a name.
    """
    for other in map(int, os.listdir("/proc/self/fd")):
        if other > 2 and other != fd:
            with contextlib.suppress(OSError):  # the descriptor of this listing
                os.close(other)


def _wait(fd: int, log_file: Path, reporter: Reporter) -> int:
    """Pass on the daemon's reports. Ctrl-C while it starts ends the run."""
    pidfd = -1
    failed = interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        if pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with os.fdopen(fd, "rb") as stream:
            for line in stream:
                match _decode(line):
                    case Started(pid):
                        with contextlib.suppress(ProcessLookupError):
                            pidfd = os.pidfd_open(pid)
                    case Progress() | Message() if failed:
                        continue  # how the rest of the run ends: the reason has been said
                    case Progress(actor, state, status):
                        reporter.progress(actor, state, status)
                    case Message(text):
                        reporter.message(text)
                    case Ready(endpoint, page, seconds):
                        reporter.ready(endpoint, page, seconds)
                        return 0
                    case Failed(reason, tail):
                        failed = True
                        reporter.lines(reason.split()[0], tail)
                        reporter.failed(reason, [])
        if pidfd >= 0:
            select.select([pidfd], [], [])
    finally:
        if pidfd >= 0:
            os.close(pidfd)
        signal.signal(signal.SIGINT, before)
    if interrupted:
        return 130
    if not failed:
        reporter.failed(f"the supervisor ended before the run was ready: see {log_file}", [])
    return 1
