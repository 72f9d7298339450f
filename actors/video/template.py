"""A template of decoders: a process inside the sandbox that has read no media, and forks a process for each item (isolation "process").

The video process begins it before it has anything of the run, and holds its control socket; its memory, descriptors and address space
are all that a decoder inherits. It reads nothing that a decoder has written. It forks a decoder ahead when it has nothing else to do. A
warden, its parent, is there because only a child can be the first process of a namespace. Who dies takes those below with it: the video
process the template, by the end of the control socket; the template the decoders, by the kernel.

Protocol of the control socket, a packet each: ``_Order`` there; back for FORK the decoder's number, with its socket, or 0; for JUDGE
its exit status; for END nothing.
"""

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import struct
import threading
import traceback
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from ..host.actor import name_thread
from ..host.capabilities import drop_capabilities
from .sandbox import Forker, enter_as_child, enter_sandbox, prepare_forker

log = logging.getLogger(__name__)

_Order = struct.Struct("=ci")
_Answer = struct.Struct("=i")
_FORK, _END, _JUDGE = b"f", b"e", b"j"
_AHEAD_S = 0.02  # without orders: then the next decoder is forked
_STANDARD_FDS = 3

ServeItem = Callable[[socket.socket], None]


class Decoder(NamedTuple):
    """A process for one item, as the video process sees it."""

    number: int
    channel: socket.socket


class Template:
    """The video process's end. Any of its threads may call."""

    def __init__(self, control: socket.socket) -> None:
        """Use ``begin``."""
        self._control = control
        self._lock = threading.Lock()
        self._is_closing = False

    @classmethod
    def begin(cls, serve_item: ServeItem, *, memory_bytes: int) -> "Template":
        """Fork the template; for a process with one thread. Its children call ``serve_item`` with their sockets.

        ``memory_bytes``: what each may take beyond what the template has. Raises: OSError.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            _be_warden(theirs, serve_item, memory_bytes)
        theirs.close()
        return cls(ours)

    def watch(self) -> None:
        """End this process, from a thread, when the template has ended: a process in the sandbox can begin no other."""
        threading.Thread(target=self._watch, name="template", daemon=True).start()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._control, 0)  # its end alone
        poll.poll()
        if not self._is_closing:
            self._end_this_process()

    def _end_this_process(self) -> NoReturn:
        """As from outside: whoever kills the template kills its process, which is begun again at once."""
        log.error("the template of decoders has ended: this process ends, to begin another")
        logging.shutdown()
        while True:
            os.kill(os.getpid(), signal.SIGKILL)

    def fork(self) -> Decoder:
        """Return a decoder that has seen nothing. Raises: OSError if there can be no more processes."""
        with self._lock:
            answer, fds = self._ask(_FORK, 0)
        if not fds:
            raise OSError("no process can be forked for a medium")
        return Decoder(answer, socket.socket(fileno=fds[0]))

    def end(self, decoder: Decoder) -> None:
        """Kill a decoder. It may live for a moment."""
        decoder.channel.close()
        with self._lock:
            self._order(_END, decoder.number)

    def judge(self, decoder: Decoder) -> int:
        """Kill a decoder, if it lives. Returns its exit status, or minus the signal."""
        decoder.channel.close()
        with self._lock:
            return self._ask(_JUDGE, decoder.number)[0]

    def close(self) -> None:
        """End the template and all decoders."""
        self._is_closing = True
        self._control.close()

    def _order(self, order: bytes, number: int) -> None:
        try:
            self._control.send(_Order.pack(order, number))
        except OSError:
            self._end_this_process()

    def _ask(self, order: bytes, number: int) -> tuple[int, list[int]]:
        self._order(order, number)
        try:
            packet, fds, _, _ = socket.recv_fds(self._control, _Answer.size, 1)
        except OSError:
            packet, fds = b"", []
        if not packet:
            self._end_this_process()
        return _Answer.unpack(packet)[0], fds


def _be_warden(control: socket.socket, serve_item: ServeItem, memory_bytes: int) -> NoReturn:
    """In the video process's child: fork the template into namespaces of its own, and end with it."""
    try:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        kept = os.dup2(control.fileno(), _STANDARD_FDS, inheritable=False)
        control.detach()
        _close_from(kept + 1)
        name_thread("ward")
        forker = prepare_forker()
        if os.fork() == 0:
            _be_template(socket.socket(fileno=kept), serve_item, memory_bytes, forker)
        _close_from(kept)
        with contextlib.suppress(OSError):
            drop_capabilities()
        os.wait()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _be_template(control: socket.socket, serve_item: ServeItem, memory_bytes: int, forker: Forker) -> NoReturn:
    try:
        name_thread("template")
        os.environ.clear()
        problem = enter_sandbox(memory_bytes=memory_bytes, file_bytes=0, forker=forker)
        if problem := problem or forker.processes_problem:
            log.info("decoders have no namespaces of their own, or none of processes: %s", problem)
        gc.collect()
        gc.freeze()  # a collection in a decoder would copy all that is shared with the template
        _Forks(control, lambda channel: _be_decoder(channel, serve_item, memory_bytes)).serve()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


class _Forks:
    """The template's own work: it forks and ends decoders until its control socket ends."""

    def __init__(self, control: socket.socket, be_decoder: Callable[[socket.socket], NoReturn]) -> None:
        self._control = control
        self._be_decoder = be_decoder
        self._pids: dict[int, int] = {}  # by number
        self._ending: set[int] = set()  # killed, and not waited for
        self._last = 0

    def serve(self) -> None:
        """Answer orders; one after a pause finds a decoder that was forked before."""
        spare = self._fork()
        while packet := self._control.recv(_Order.size):
            order, number = _Order.unpack(packet)
            if order == _FORK:
                self._give(spare or self._fork())
                spare = None
            else:
                self._kill(number)
            if order == _JUDGE:
                self._control.send(_Answer.pack(self._reap(number)))
            self._reap_ended()
            if not select.select([self._control], [], [], _AHEAD_S)[0]:
                self._reap_ended()
                spare = spare or self._fork()
            while self._ending and not select.select([self._control], [], [], _AHEAD_S)[0]:
                self._reap_ended()

    def _give(self, found: tuple[int, socket.socket] | None) -> None:
        if found is None:
            self._control.send(_Answer.pack(0))
            return
        number, theirs = found
        socket.send_fds(self._control, [_Answer.pack(number)], [theirs.fileno()])
        theirs.close()

    def _fork(self) -> tuple[int, socket.socket] | None:
        """Return a decoder's number and the other end of its socket; None if there can be no more."""
        try:
            theirs, own = socket.socketpair()
            pid = os.fork()
        except OSError as error:
            log.warning("no decoder can be forked: %s", error.strerror)
            return None
        if pid == 0:
            self._control.close()
            theirs.close()
            self._be_decoder(own)
        own.close()
        self._last += 1
        self._pids[self._last] = pid
        return self._last, theirs

    def _kill(self, number: int) -> None:
        os.kill(self._pids[number], signal.SIGKILL)  # a child not waited for: the pid is still its own
        self._ending.add(number)

    def _reap(self, number: int) -> int:
        self._ending.discard(number)
        return os.waitstatus_to_exitcode(os.waitpid(self._pids.pop(number), 0)[1])

    def _reap_ended(self) -> None:
        """Wait for none: those that have not ended yet have a later turn. All count as processes of their user until then."""
        for number in [number for number in self._ending if os.waitpid(self._pids[number], os.WNOHANG)[0]]:
            self._ending.remove(number)
            del self._pids[number]


def _be_decoder(channel: socket.socket, serve_item: ServeItem, memory_bytes: int) -> NoReturn:
    """In the template's child: give up its last rights, then read media."""
    status = 1
    try:
        name_thread("decoder")
        enter_as_child(memory_bytes)
        serve_item(channel)
        status = 0
    except (ConnectionError, EOFError):
        status = 0  # the video process wants no more of it
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _close_from(first: int) -> None:
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
