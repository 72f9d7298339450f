"""Start processes for the supervisor: plainly, or forked from the zygote; ``Zygote`` is the supervisor's end of it.

If the zygote is absent or cannot fork (more than one thread), ``Zygote`` raises ZygoteError, and the supervisor starts
the actor plainly, which is only slower.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from .processes import Activity, Child, activity, spawn
from .zygote import MAX_PACKET_BYTES, Copy, Fork, Forked, Guard, Imported, Reply, Request

log = logging.getLogger(__name__)

# -P: do not import from the working directory.
PYTHON = (sys.executable, "-P", "-u")
ACTOR_ENTRY = "mmrt.actors.host.process:run_actor"
BASE_STAGE = "base"
# Third-party modules that every actor imports: half of an actor's start time.
BASE_MODULES = (
    "asyncio",
    "numpy",
    "numpy.typing",
    "msgspec",
    "zmq",
    "uvloop",
    "dataclasses",
    "hashlib",
    "shutil",
    "tomllib",
    "difflib",
)
TORCH_STAGE = "torch"
FORK_LIMIT_S = 5.0  # a fork takes some ms; a zygote hangs that rests for so long over one, or computes for so long
IMPORT_LIMIT_S = 120.0  # while it still imports modules: it does nothing else until a stage is done
_LOOK_S = 0.25


class ZygoteError(RuntimeError):
    """The zygote is gone, refuses, or could not fork."""


class ZygoteDiedError(ZygoteError):
    """The zygote died, or is being killed, during a fork that may have happened."""


def actor_command(name: str) -> list[str]:
    """Return the command that starts an actor plainly: the one in a systemd unit, with this interpreter."""
    return [*PYTHON, "-m", "mmrt.cli.main", "actor", name]


def is_fork(pid: int, run: Path) -> bool:
    """Return whether this is the run's zygote or a live fork of it: a fork keeps the command line."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"mmrt.runtime.supervisor.zygote" in words and os.fsencode(run) in words


ZYGOTE_STAGES = {BASE_STAGE: BASE_MODULES, TORCH_STAGE: ("torch", "llvmlite.ir")}
"""The zygote's imports, in order: those that all actors need, and those that most wait for. Each is there when those before it are."""


_decode_reply = msgspec.msgpack.Decoder(Reply).decode


class Patience:
    """Time limits for a process that is waited for since ``since_s``, when it had used ``used_s`` seconds of a processor (pure)."""

    def __init__(self, since_s: float, used_s: float) -> None:
        self._resting_since_s = since_s
        self._used_s = used_s

    def is_over(self, now_s: float, seen: Activity, limit_s: float) -> bool:
        """Return whether it has idled or computed for longer than ``limit_s``. Waiting for a processor is neither."""
        if seen.wants_processor:
            self._resting_since_s = now_s
        return max(now_s - self._resting_since_s, seen.used_s - self._used_s) > limit_s


class Zygote:
    """One zygote process and the socket to it. Belongs to the running event loop."""

    def __init__(self, process: Child, control: socket.socket, stages: Iterable[str]) -> None:
        self.process = process
        self._control = control
        self._ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[int]] = {}
        self._fit = True
        self.has_hung = False  # in a fork, and was killed for it
        self._importing = set(stages)
        self._whole = asyncio.Event()  # all is imported, or it is gone
        if not self._importing:
            self._whole.set()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(control, self._receive)

    @classmethod
    def start(
        cls,
        run: Path,
        stages: Mapping[str, Sequence[str]],
        environment: Mapping[str, str],
        *,
        output_fd: int,
    ) -> "Zygote":
        """Start the process; it begins to import at once. ``output_fd`` gets what it prints."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.setblocking(False)
            command: tuple[str, ...] = (*PYTHON, "-m", "mmrt.runtime.supervisor.zygote", "--control-fd", "3", "--run", str(run))
            command += tuple(f"--stage={name}={','.join(modules)}" for name, modules in stages.items())
            # The control socket takes the lifeline's place: its end is the zygote's sign that the supervisor is gone.
            process = spawn(command, environment, output_fd=output_fd, lifeline_fd=theirs.fileno())
        return cls(process, ours, stages)

    @property
    def usable(self) -> bool:
        return self.process.alive and self._fit

    @property
    def busy(self) -> bool:
        """True while a fork is in progress: there may be a child that the supervisor does not know yet."""
        return bool(self._replies)

    async def fork(
        self,
        name: str,
        *,
        needs: str,
        entry: str,
        argument: str,
        environment: Mapping[str, str],
        output_fd: int,
        lifeline_fd: int,
    ) -> Child:
        """Fork a process that calls ``entry`` ("module:function") with ``argument``, once the stage ``needs`` is imported.

        Raises: ZygoteError.
        """
        variables = b"\0".join(os.fsencode(f"{key}={value}") for key, value in environment.items())
        number = next(self._ids)
        return await self._process(Fork(number, name, needs, entry, argument, variables), [output_fd, lifeline_fd])

    async def copy(self, output_fd: int) -> "Zygote":
        """Fork a spare, once all is imported. Raises: ZygoteError."""
        await self._whole.wait()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            try:
                process = await self._process(Copy(next(self._ids)), [output_fd, theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        return Zygote(process, ours, ())

    async def _process(self, request: Fork | Copy, fds: list[int]) -> Child:
        """Return the process that a fork makes. Raises: ZygoteError."""
        if not self.usable:
            raise ZygoteError("the zygote is gone")
        reply: asyncio.Future[int] = self._loop.create_future()
        self._replies[request.id] = reply
        try:
            self._send(request, fds)
            return Child(await self._forked(reply))
        finally:
            del self._replies[request.id]

    async def _forked(self, reply: asyncio.Future[int]) -> int:
        """Wait for the pid of the fork. A zygote that waits for a processor, on a busy machine, gets more time."""
        patience: Patience | None = None
        while not reply.done():
            seen = activity(self.process.pid)
            now_s = time.monotonic()
            if seen is not None:
                patience = patience or Patience(now_s, seen.used_s)
                limit_s = IMPORT_LIMIT_S if self._importing else FORK_LIMIT_S
                if patience.is_over(now_s, seen, limit_s):
                    self._fit, self.has_hung = False, True
                    self.process.signal(signal.SIGKILL)
                    raise ZygoteDiedError(f"the zygote hangs: no fork within {limit_s:g} s")
            await asyncio.wait([reply], timeout=_LOOK_S)
        return reply.result()

    def guard(self, process: Child) -> None:
        """Make the zygote end this process too, if the supervisor dies and the process does not notice."""
        if self.usable and process.alive:
            with contextlib.suppress(ZygoteError):
                self._send(Guard(process.pid), [process.pidfd])

    def close(self) -> None:
        """Forget the zygote and kill it: it has no state to lose, and closing its socket alone would start its guarding."""
        reason = "the zygote was closed" if self.process.alive else "the zygote died"  # its end may be seen before its socket's
        self._fit = False
        self.process.signal(signal.SIGKILL)
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control)
            self._control.close()
        self._fail_all(reason)

    def _send(self, request: Request, fds: list[int]) -> None:
        packet = msgspec.msgpack.encode(request)
        if len(packet) > MAX_PACKET_BYTES:
            raise ZygoteError(f"a request of {len(packet)} bytes, the limit is {MAX_PACKET_BYTES}: large environment?")
        try:
            socket.send_fds(self._control, [packet], fds)
        except OSError as error:
            raise ZygoteError(f"cannot reach the zygote: {error.strerror}") from None

    def _receive(self) -> None:
        while True:
            try:
                packet = self._control.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._loop.remove_reader(self._control)
                self._fit = False
                self._fail_all("the zygote died")
                return
            self._take(_decode_reply(packet))

    def _take(self, message: Reply) -> None:
        if isinstance(message, Imported):
            log.debug("zygote: %s in after %.2f s", message.stage, message.seconds)
            self._importing.discard(message.stage)
            if not self._importing:
                self._whole.set()
            if message.error:
                log.warning("zygote: %s", message.error)
            if message.unfit:
                log.warning("zygote: %s after importing %s: actors start without it", message.unfit, message.stage)
                self._fit = False
            return
        reply = self._replies.get(message.id)
        if reply is None or reply.done():
            return
        if isinstance(message, Forked):
            reply.set_result(message.pid)
        else:
            reply.set_exception(ZygoteError(message.error))

    def _fail_all(self, reason: str) -> None:
        self._whole.set()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(ZygoteDiedError(reason))


def pipe_to_logs() -> tuple[int, int]:
    """Make a pipe for a child's output: the supervisor's end does not block, neither end is inherited."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    return read_end, write_end
