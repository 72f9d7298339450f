"""The gateway's fetch process: it alone opens connections to other servers, so that a hostile one meets no more than this process.

``python -m mmrt.actors.gateway.fetch.process`` reads rules and URLs from its standard input, answers on its standard output, and ends
with its input, or with the gateway. Fetches run side by side. The gateway's end is ``client``.
"""

import asyncio
import ctypes
import logging
import os
import resource
import signal
import ssl
import sys
import threading
from functools import partial
from pathlib import Path

import uvloop

from ....runtime.config.fetch import FetchSection
from ...host.capabilities import drop_capabilities
from ...host.landlock import confine_to_files
from ...host.limits import MAX_STACK_BYTES, NO_CORE_BYTES, lower_limits
from ...host.seccomp import forbid_system_calls
from ..reading.url_rules import FetchError
from .download import MAX_HELD_BYTES, Downloader, SystemNames
from .frames import MAX_FETCHES, Ask, Fetched, decode_ask, decode_rules, frame, read_frame

log = logging.getLogger(__name__)

# Bytes of a medium can lie here three times for a moment: while they grow, and on their way out.
MEMORY_BYTES = 3 * MAX_HELD_BYTES + (256 << 20)
_NUM_FILES = 512
_STACK_BYTES = 1 << 20  # of a thread that resolves a name: those of all threads count as memory
_SYSTEM = ("/etc", "/run/systemd/resolve", "/run/resolvconf", "/var/cache/nscd")  # names of hosts, authorities of TLS
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38


def main() -> None:
    """Fetch until the input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    threading.stack_size(_STACK_BYTES)
    restrict()
    uvloop.run(_serve())


def restrict() -> None:
    """Give up what no fetch needs, before any thread begins: root's capabilities, new privileges, other programs and processes, unix
    sockets (those of the run would take this process for one of it), and more than bounded memory and files. ``confine`` takes files.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    data_pages = int(Path("/proc/self/statm").read_text().split()[5])
    limits = {
        resource.RLIMIT_CORE: NO_CORE_BYTES,
        resource.RLIMIT_STACK: MAX_STACK_BYTES,
        resource.RLIMIT_DATA: data_pages * resource.getpagesize() + MEMORY_BYTES,
        resource.RLIMIT_NOFILE: _NUM_FILES,
        resource.RLIMIT_FSIZE: 0,  # it writes no file
    }
    lower_limits(limits)
    for what, give_up in (("capabilities", drop_capabilities), ("system calls", partial(forbid_system_calls, network=True))):
        try:
            give_up()
        except OSError as error:
            _tell_missing(what, error)


class Worker:
    """Runs the fetches, and writes their ends one after another."""

    def __init__(self, downloader: Downloader, target: asyncio.StreamWriter) -> None:
        self._downloader = downloader
        self._target = target
        self._turn = asyncio.Lock()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, ask: Ask) -> None:
        """Begin a fetch, or end one."""
        if ask.url:
            task = self._tasks[ask.number] = asyncio.get_running_loop().create_task(self._fetch(ask))
            task.add_done_callback(lambda task: self._end(ask.number, task))
        elif (running := self._tasks.get(ask.number)) is not None:
            running.cancel()

    def _end(self, number: int, task: asyncio.Task[None]) -> None:
        del self._tasks[number]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a fetch failed: %r", error)  # no memory, or a bug: the gateway starts another process
            os._exit(1)

    async def _fetch(self, ask: Ask) -> None:
        try:
            data = await self._downloader.download(ask.url, ask.max_bytes)
        except FetchError as error:
            await self._write(Fetched(ask.number, error=error.message, status=error.status))
            return
        try:
            await asyncio.shield(self._write(Fetched(ask.number, len(data)), data))  # half of it would spoil all that follows
        finally:
            self._downloader.release(len(data))

    async def _write(self, fetched: Fetched, data: bytes | bytearray = b"") -> None:
        async with self._turn:
            self._target.write(frame(fetched))
            self._target.write(data)
            await self._target.drain()


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    source = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(source), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(lambda: asyncio.streams.FlowControlMixin(loop=loop), sys.stdout)
    target = asyncio.StreamWriter(transport, protocol, None, loop)
    try:
        rules = decode_rules(await read_frame(source))
        confine(rules)
        worker = Worker(Downloader(rules, SystemNames(MAX_FETCHES).addresses_of), target)
        target.write(frame(Fetched(0)))
        while True:
            worker.take(decode_ask(await read_frame(source)))
    except EOFError:
        os._exit(0)  # name servers may keep threads


def confine(rules: FetchSection) -> None:
    """Give up all files but code, those that the rules allow, and what says names and authorities. Before any thread begins.

    A root that is put in the place of another afterwards is not seen.
    """
    paths = ssl.get_default_verify_paths()
    named = (paths.cafile, paths.capath, *(os.environ.get(name) for name in (paths.openssl_cafile_env, paths.openssl_capath_env)))
    readable = [*_SYSTEM, *filter(None, named), *rules.allowed_roots]
    try:
        confine_to_files([Path(os.path.realpath(path)) for path in readable], has_network=True)
    except OSError as error:
        _tell_missing("files", error)


def _tell_missing(what: str, error: OSError) -> None:
    log.warning("media are fetched with more rights than needed: this system does not restrict %s (%s)", what, error.strerror)


if __name__ == "__main__":
    os.umask(0o077)
    main()
