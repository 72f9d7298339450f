"""The gateway's side of the grammar process: ask it, keep its answers, and replace it when it dies or is too slow.

Runs in the gateway's event loop, which waits for the process and never compiles by itself. The process starts with the first request
that needs it.
"""

import asyncio
import contextlib
import logging
import struct
import sys
from collections import OrderedDict
from pathlib import Path

import msgspec

from ...models.grammar.source import GrammarSource
from ...runtime.errors import RequestError

log = logging.getLogger(__name__)

CPU_S = 2.0
MEMORY_BYTES = 1 << 30
START_S = 60.0
DEADLINE_S = 10.0  # for CPU_S of a processor that others use as well
MAX_JOBS = 32
MAX_KEPT_CHARS = 4 << 20
_RETRY_S = 1
LENGTH = struct.Struct("<I")
READY = b"ready"
_MODULE = f"{__package__}.grammar_process"


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a source: llguidance's text of it, or an error and its JSON pointer."""

    grammar: str = ""
    error: str = ""
    pointer: str = ""


decode_verdict = msgspec.msgpack.Decoder(Verdict).decode


def frame(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


class GrammarChecks:
    """Asks the grammar process of a model, one source at a time."""

    def __init__(self, model_path: Path) -> None:
        self._model_path = model_path
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._jobs: dict[GrammarSource, asyncio.Task[Verdict]] = {}
        self._kept: OrderedDict[GrammarSource, Verdict] = OrderedDict()
        self._num_kept_chars = 0

    async def compile(self, source: GrammarSource, field: str) -> str:
        """Return llguidance's text of a source that compiles.

        Raises:
            RequestError: 400 if it does not, naming ``field`` and the place in it; 503 if too many sources wait.
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
        return verdict.grammar

    async def close(self) -> None:
        """End the process."""
        for job in self._jobs.values():
            job.cancel()
        await self._end_process()

    def _begin(self, source: GrammarSource) -> "asyncio.Task[Verdict]":
        job = self._jobs[source] = asyncio.get_running_loop().create_task(self._run(source))
        job.add_done_callback(lambda _: self._jobs.pop(source))
        return job

    async def _run(self, source: GrammarSource) -> Verdict:
        async with self._turn:
            verdict = await self._ask(source)
            if verdict is None:  # died, maybe by another's hand
                verdict = await self._ask(source)
        if verdict is None:
            return Verdict(error=f"its compilation took more than {CPU_S:.0f} s of a processor or {MEMORY_BYTES >> 20} MiB, or failed")
        self._keep(source, verdict)
        return verdict

    async def _ask(self, source: GrammarSource) -> Verdict | None:
        """Return the process's answer; None if it has died or had to be killed."""
        try:
            process = await self._started()
            assert process.stdin is not None
            async with asyncio.timeout(DEADLINE_S):
                process.stdin.write(frame(msgspec.msgpack.encode(source)))
                await process.stdin.drain()
                return decode_verdict(await self._receive(process))
        except (TimeoutError, EOFError, OSError) as error:
            log.warning("the grammar process failed on a %s of %d characters: %r", source.kind, len(source.text), error)
            await self._end_process()
            return None
        except asyncio.CancelledError:
            await self._end_process()
            raise

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            command = [sys.executable, "-P", "-m", _MODULE, str(self._model_path)]
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
            async with asyncio.timeout(START_S):
                ready = await self._receive(self._process)
            assert ready == READY
        return self._process

    @staticmethod
    async def _receive(process: asyncio.subprocess.Process) -> bytes:
        assert process.stdout is not None
        head = await process.stdout.readexactly(LENGTH.size)
        return await process.stdout.readexactly(*LENGTH.unpack(head))

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _keep(self, source: GrammarSource, verdict: Verdict) -> None:
        self._kept[source] = verdict
        self._num_kept_chars += _size(source, verdict)
        while self._num_kept_chars > MAX_KEPT_CHARS:
            self._num_kept_chars -= _size(*self._kept.popitem(last=False))


def _size(source: GrammarSource, verdict: Verdict) -> int:
    return len(source.text) + len(verdict.grammar) + len(verdict.error)
