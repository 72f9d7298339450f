"""The gateway's side of the grammar process: ask it, keep its answers, and replace it when it dies or is too slow.

Runs in the gateway's event loop, which waits for the process and never compiles by itself. The process starts with the first request
that needs it.
"""

import asyncio
import contextlib
import logging
import signal
import struct
import sys
from collections import OrderedDict
from pathlib import Path

import msgspec

from ....models.grammar.source import GrammarSource
from ....runtime.errors import RequestError
from ..reading.ignored import tolerate

log = logging.getLogger(__name__)

CPU_S = 2.0
MEMORY_BYTES = 1 << 30
START_S = 60.0
DEADLINE_S = 10.0  # for CPU_S of a processor that others use as well
MAX_JOBS = 32
MAX_KEPT_CHARS = 4 << 20
_RETRY_S = 1
_NUM_TRIALS = 2  # a process that dies by another's hand is replaced
LENGTH = struct.Struct("<I")
READY = b"ready"
OPEN = "open"  # an argument of the process
_MODULE = f"{__package__}.process"
# What a source has taken that has ended the process, by its exit status. Where memory or stack end, the library aborts.
_MEMORY = f"more than {MEMORY_BYTES >> 20} MiB, or a deeper stack than there is"
_TOO_MUCH = {-signal.SIGXCPU: f"more than {CPU_S:.0f} s of a processor", -signal.SIGABRT: _MEMORY, -signal.SIGSEGV: _MEMORY}


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a source: llguidance's text of it, with what is ignored and why, by JSON pointers; or an error and its pointer.
    ``failure``: the traceback of an exception that is a defect of ours."""

    grammar: str = ""
    error: str = ""
    pointer: str = ""
    dropped: list[tuple[str, str]] = []
    failure: str = ""


decode_verdict = msgspec.msgpack.Decoder(Verdict).decode


def frame(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


class GrammarChecks:
    """Asks the grammar process of a model, one source at a time."""

    def __init__(self, model_path: Path, *, is_open: bool = False) -> None:
        """``is_open``: as of ``hold``."""
        self._arguments = [str(model_path), *([OPEN] if is_open else [])]
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._jobs: dict[GrammarSource, asyncio.Task[Verdict]] = {}
        self._kept: OrderedDict[GrammarSource, Verdict] = OrderedDict()
        self._num_kept_chars = 0

    async def compile(self, source: GrammarSource, field: str) -> str:
        """Return llguidance's text of a source that compiles.

        What a schema says in vain is named in the answer's header (``ignored``).

        Raises:
            RequestError: 400 if it does not, naming ``field`` and the place in it; 503 if too many sources wait, or the process does
                not answer in time; 500 if the process fails.
        """
        verdict = self._kept.get(source)
        if verdict is None:
            if source not in self._jobs and len(self._jobs) >= MAX_JOBS:
                message = f"{len(self._jobs)} grammars wait to be compiled, the limit is {MAX_JOBS}"
                raise RequestError(message, status=503, type="overloaded_error", retry_after_s=_RETRY_S)
            job = self._jobs.get(source) or self._begin(source)
            verdict = await asyncio.shield(job)  # of a client that goes others may wait for the same
        else:
            self._kept.move_to_end(source)
        if verdict.error:
            place = f" at {verdict.pointer}" if verdict.pointer else ""
            raise RequestError(f"{field}: cannot be compiled{place}: {verdict.error}", param=field)
        for pointer, reason in verdict.dropped:
            tolerate(field + _path(pointer), reason)
        return verdict.grammar

    async def close(self) -> None:
        """End the process."""
        jobs = list(self._jobs.values())
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await self._end_process()

    def _begin(self, source: GrammarSource) -> "asyncio.Task[Verdict]":
        job = self._jobs[source] = asyncio.get_running_loop().create_task(self._run(source))
        job.add_done_callback(lambda _: self._jobs.pop(source))
        job.add_done_callback(lambda job: job.cancelled() or job.exception())  # nobody may be left who waits for it
        return job

    async def _run(self, source: GrammarSource) -> Verdict:
        async with self._turn:
            for _ in range(_NUM_TRIALS):
                verdict = await self._ask(source)
                if verdict is not None and verdict.failure:
                    log.error("a %s of %d characters cannot be compiled: %s", source.kind, len(source.text), verdict.failure)
                    break
                if verdict is not None:
                    self._keep(source, verdict)
                    return verdict
        raise RequestError("the grammar process failed", status=500, type="internal_error")

    async def _ask(self, source: GrammarSource) -> Verdict | None:
        """Return the process's answer, or an error of a source that has ended it; None if something else has.

        Raises: RequestError (503) if no answer comes in time, which may be the machine's fault.
        """
        try:
            process = await self._started()
            assert process.stdin is not None
            async with asyncio.timeout(DEADLINE_S):
                process.stdin.write(frame(msgspec.msgpack.encode(source)))
                await process.stdin.drain()
                return decode_verdict(await self._receive(process))
        except TimeoutError:
            await self._end_process()
            message = f"compiling a {source.kind} of {len(source.text)} characters took more than {DEADLINE_S:.0f} s"
            log.warning("%s", message)
            raise RequestError(message, status=503, type="overloaded_error", retry_after_s=_RETRY_S) from None
        except (EOFError, OSError) as error:
            status = await self._end_process()
            log.warning("the grammar process ended (%s) on a %s of %d characters: %r", status, source.kind, len(source.text), error)
            return None if status not in _TOO_MUCH else Verdict(error=f"its compilation takes {_TOO_MUCH[status]}")
        except BaseException:
            await self._end_process()  # its next answer would be that to this source
            raise

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            command = [sys.executable, "-P", "-m", _MODULE, *self._arguments]
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
            try:
                async with asyncio.timeout(START_S):
                    ready = await self._receive(self._process)
            except TimeoutError:
                message = f"the grammar process has not started within {START_S:.0f} s"
                raise RequestError(message, status=503, type="overloaded_error", retry_after_s=_RETRY_S) from None
            assert ready == READY
        return self._process

    @staticmethod
    async def _receive(process: asyncio.subprocess.Process) -> bytes:
        assert process.stdout is not None
        head = await process.stdout.readexactly(LENGTH.size)
        return await process.stdout.readexactly(*LENGTH.unpack(head))

    async def _end_process(self) -> int | None:
        """End the process, if there is one, and return its exit status: negative is the signal that has ended it."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()

    def _keep(self, source: GrammarSource, verdict: Verdict) -> None:
        self._kept[source] = verdict
        self._num_kept_chars += _size(source, verdict)
        while self._num_kept_chars > MAX_KEPT_CHARS:
            self._num_kept_chars -= _size(*self._kept.popitem(last=False))


def _path(pointer: str) -> str:
    """A JSON pointer as the paths of fields are written."""
    steps = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]
    return "".join(f"[{step}]" if step.isdecimal() else f".{step}" for step in steps)


def _size(source: GrammarSource, verdict: Verdict) -> int:
    return (
        len(source.text) + len(verdict.grammar) + len(verdict.error) + sum(map(len, (text for one in verdict.dropped for text in one)))
    )
