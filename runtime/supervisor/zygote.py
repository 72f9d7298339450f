"""The zygote: one process per run that imports torch once and forks actors in tens of milliseconds.

Started by ``launcher`` as ``python -m mmrt.runtime.supervisor.zygote``. It imports nothing else of mmrt, so that a forked actor loads
its current code. Measured rules: no parallel region ever, one thread at every fork, and no GPU opened: a process that
has initialised CUDA cannot be forked, one that has only imported torch can. An actor is forked twice, so that the supervisor, a
subreaper, becomes its parent.

A spare is a copy of the zygote, forked from it once all is imported, that waits on a control socket of its own. When the zygote dies,
the spare takes over at once: a new one would import torch first. The supervisor sends it the processes that live; until then it
guards nothing and ends with the supervisor.

The zygote is also the guardian: it holds a pidfd of every child of the supervisor. When the control socket closes, the supervisor
is gone; actors then end on their own, the zygote kills those left after ``GUARD_GRACE_S`` and removes the run directory.

Protocol: SOCK_SEQPACKET, one ``Request`` or ``Reply`` per packet, in MessagePack.
"""

import argparse
import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
import types
from typing import NoReturn

import msgspec

GUARD_GRACE_S = 5.0
MAX_PACKET_BYTES = 1 << 16
_PR_SET_NAME = 15
_NEEDLESS = "torch._meta_registrations"  # a quarter of torch's imports, for tensors without memory: a compiler's


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a process that calls ``entry`` ("module:function") with ``argument``, once the import stage ``needs`` is done.

    Two descriptors come with it: its output and its lifeline.
    """

    id: int
    name: str
    needs: str
    entry: str
    argument: str
    environment: bytes  # NAME=VALUE, separated by zero bytes: these need not be UTF-8


class Copy(msgspec.Struct, frozen=True, tag=True):
    """Fork a spare. Two descriptors come with it: its output and its control socket."""

    id: int


class Guard(msgspec.Struct, frozen=True, tag=True):
    """End this process when the supervisor is gone. A pidfd of it comes with it."""

    pid: int


class Forked(msgspec.Struct, frozen=True, tag=True):
    id: int
    pid: int


class ForkFailed(msgspec.Struct, frozen=True, tag=True):
    id: int
    error: str


class Imported(msgspec.Struct, frozen=True, tag=True):
    """An import stage is done. ``unfit``: why the zygote can no longer fork; "" if it can."""

    stage: str
    seconds: float
    unfit: str
    error: str


Request = Fork | Copy | Guard
Reply = Forked | ForkFailed | Imported
_decode_request = msgspec.msgpack.Decoder(Request).decode


def main() -> int:
    """Run the import stages in turn, serving requests in between, then serve until the supervisor is gone."""
    parser = argparse.ArgumentParser(prog="python -m mmrt.runtime.supervisor.zygote")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--run", required=True, help="the run directory, to be removed when the supervisor is gone")
    parser.add_argument("--stage", action="append", default=[], help="NAME=MODULE,MODULE…: imported in this order")
    parser.add_argument("--grace", type=float, default=GUARD_GRACE_S, help="seconds for what is left to end by itself")
    options = parser.parse_args()
    gc.disable()
    _set_name("mmrt-zygote")
    zygote = _Zygote(socket.socket(fileno=options.control_fd), options.run, options.grace)
    if "MMRT_FAULTS" in os.environ:
        _die_at_lines()
    for stage in options.stage:
        name, _, modules = stage.partition("=")
        if not zygote.serve(block=False):
            break
        zygote.load(name, [module for module in modules.split(",") if module])
    zygote.serve_to_the_end()
    return 0


def _die_at_lines() -> None:
    """For chaos: the one case in which the zygote imports more of mmrt."""
    faults, environment = (importlib.import_module(f"mmrt.runtime.{name}") for name in ("bus.line_faults", "environment"))
    faults.die_at_lines("zygote", environment.read_environment())


class _Zygote:
    def __init__(self, control: socket.socket, run: str, grace_s: float) -> None:
        self._control = control
        self._control.set_inheritable(False)
        self._run_path, self._grace_s = run, grace_s
        self._pidfds: list[int] = []
        self._loaded = {""}
        self._is_spare = False
        self._waiting: list[tuple[Fork, list[int]]] = []

    def load(self, stage: str, modules: list[str]) -> None:
        """Import the modules of a stage. The actor reports a module that fails, with its own traceback."""
        began_s = time.monotonic()
        error = ""
        sys.modules.setdefault(_NEEDLESS, types.ModuleType(_NEEDLESS))
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception as failure:  # any import error of foreign code: the actor that needs the module will show it
                error = f"import {module}: {failure}"
        gc.freeze()  # without a collection, which finds next to nothing and takes a tenth of the imports' time
        self._loaded.add(stage)
        seconds = time.monotonic() - began_s
        self._reply(Imported(stage, seconds, _unfit(), error))
        waiting, self._waiting = self._waiting, []
        for request, fds in waiting:
            self._handle(request, fds)

    def serve_to_the_end(self) -> None:
        """Serve until the supervisor is gone, then guard; a spare that was not needed has nothing to guard."""
        self.serve(block=True)
        if not self._is_spare:
            _guard(self._pidfds, self._run_path, self._grace_s)

    def serve(self, *, block: bool) -> bool:
        """Handle requests; without ``block`` only those that have arrived. Returns False when the supervisor is gone."""
        while block or select.select([self._control], [], [], 0)[0]:
            try:
                packet, fds, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 4)
            except ConnectionError:
                return False
            for fd in fds:
                os.set_inheritable(fd, False)
            if not packet:
                return False
            if self._is_spare:
                self._is_spare = False
                _set_name("mmrt-zygote")
            self._handle(_decode_request(packet), fds)
        return True

    def _handle(self, request: Request, fds: list[int]) -> None:
        if isinstance(request, Guard):
            self._pidfds = [fd for fd in self._pidfds if not _has_ended(fd)] + fds
            return
        if isinstance(request, Fork) and request.needs not in self._loaded:
            self._waiting.append((request, fds))
            return
        try:
            reply: Reply = Forked(request.id, self._fork(request, fds))
        except OSError as error:
            reply = ForkFailed(request.id, str(error))
        for fd in fds:
            os.close(fd)
        self._reply(reply)

    def _fork(self, request: Fork | Copy, fds: list[int]) -> int:
        """Fork twice and return the grandchild's pid once it is the supervisor's child. Raises OSError."""
        if unfit := _unfit():
            raise OSError(f"the zygote {unfit} and cannot fork safely")
        read_end, write_end = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        between = os.fork()
        if between == 0:
            # Whatever happens, neither the child nor the grandchild may return into this stack.
            try:
                grandchild = os.fork()
                if grandchild:
                    os.write(write_end, str(grandchild).encode())
                    os._exit(0)
                if isinstance(request, Copy):
                    self._become_spare(fds)
                _become_actor(request, fds)
            finally:
                os._exit(1)
        os.close(write_end)
        pid = os.read(read_end, 32)
        os.close(read_end)
        os.waitpid(between, 0)
        if not pid:
            raise OSError("the second fork failed")
        return int(pid)

    def _become_spare(self, fds: list[int]) -> NoReturn:
        """Turn the grandchild into a spare: its own output and control socket, no other descriptors, nothing to guard."""
        output, control = fds
        os.setpgid(0, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        kept = os.dup2(control, self._control.fileno(), inheritable=False)
        os.closerange(3, kept)
        _close_from(kept + 1)
        self._pidfds, self._is_spare = [], True
        _set_name("mmrt-spare")
        self.serve_to_the_end()
        os._exit(0)

    def _reply(self, reply: Reply) -> None:
        with contextlib.suppress(OSError):  # a supervisor that is gone shows as the end of the requests
            self._control.send(msgspec.msgpack.encode(reply))


def _become_actor(request: Fork, fds: list[int]) -> NoReturn:
    """Turn the grandchild into an actor: set descriptors and environment, drop the zygote's state, run the entry, exit."""
    status = 1
    try:
        output, lifeline = fds
        os.setpgid(0, 0)
        # The lifeline may lie on descriptor 1 or 2 after dup2 only if it was there before: the zygote keeps 0 to 2 open.
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(lifeline, 3)
        _close_from(4)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        for variable in filter(None, request.environment.split(b"\0")):
            name, _, value = variable.partition(b"=")
            os.environb[name] = value
        _set_name(request.name)
        sys.argv = ["mmrt", "actor", request.argument]
        random.seed()
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        gc.enable()
        module, _, function = request.entry.partition(":")
        result = getattr(importlib.import_module(module), function)(request.argument)
        status = result if isinstance(result, int) else 0
    except SystemExit as exit_request:
        code = exit_request.code
        status = code if isinstance(code, int) else 0 if code is None else 1
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):  # like the interpreter at its end: a failing hook changes nothing about the status
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _set_name(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _close_from(first: int) -> None:
    most = os.sysconf("SC_OPEN_MAX")
    os.closerange(first, most if most < 1 << 20 else 1 << 20)


def _unfit() -> str:
    """Return why this process cannot be forked, "" if it can."""
    if (threads := _num_threads()) != 1:
        return f"has {threads} threads"
    return "has opened a GPU" if _has_opened_gpu() else ""


def _has_opened_gpu() -> bool:
    """Return whether CUDA was initialised: torch reports it, or one of its device files is open."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this listing
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia"):
                return True
    return False


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _has_ended(pidfd: int) -> bool:
    if not select.select([pidfd], [], [], 0)[0]:
        return False
    os.close(pidfd)
    return True


def _guard(pidfds: list[int], run: str, grace_s: float) -> None:
    """Clean up after the supervisor: give its children time to end, kill those that do not, remove the run directory."""
    deadline_s = time.monotonic() + grace_s
    while pidfds and (left_s := deadline_s - time.monotonic()) > 0:
        select.select(pidfds, [], [], left_s)
        pidfds = [fd for fd in pidfds if not _has_ended(fd)]
    for pidfd in pidfds:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    while pidfds:
        select.select(pidfds, [], [])
        pidfds = [fd for fd in pidfds if not _has_ended(fd)]
    importlib.import_module("mmrt.runtime.process.lifeline").sweep(run)


if __name__ == "__main__":
    sys.exit(main())
