"""The two sides of the comparison, each in a process of its own that idles while the other works.

A party is a module that is run as a program: it loads its model, says what it is, and does jobs that it reads from standard input, one
JSON text in a line. It ends when that ends.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Protocol, TypeVar

import msgspec

from mmrt.bench.serve.errors import BenchError

CONTEXT_TOKENS = 256  # of the prompt that is prefilled, and of each sequence before a step
MAX_SEQUENCES = 16
_STEPS = 6  # timed in one job, after one that is not: it has the weights to read into caches that the other party has used


class Job(msgspec.Struct, frozen=True):
    """A prefill of ``CONTEXT_TOKENS`` tokens of one sequence if ``num_sequences`` is 0; else steps of so many sequences."""

    num_sequences: int
    num_threads: int


class Time(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of one prefill or step; ``cpu_s`` of all threads of the process."""

    wall_s: float
    cpu_s: float


class Hello(msgspec.Struct, frozen=True):
    """``logits``: of the token after ``prompt``."""

    build: str
    logits: list[float]


class Party(Protocol):
    """A model with the prompt in the KV cache of each of ``MAX_SEQUENCES`` sequences."""

    build: str  # the version and the instructions that it uses

    def use_threads(self, num_threads: int) -> None: ...

    def prefill(self) -> None:
        """Prefill the prompt anew, for the first sequence."""
        ...

    def step(self, num_sequences: int) -> None:
        """Compute the logits after the last prompt's token and one more, of so many sequences."""
        ...

    def logits(self) -> Sequence[float]:
        """Of the first sequence after ``step``."""
        ...


def prompt(vocab_size: int) -> list[int]:
    """Token ids: those to prefill, and one more for the step after it."""
    return [(37 * index + 11) % vocab_size for index in range(CONTEXT_TOKENS + 1)]


def serve(load: Callable[[], Party]) -> None:
    """The party's program. Whatever its libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    party = load()
    party.use_threads(1)
    party.step(1)
    _write(answers, Hello(party.build, list(party.logits())))
    decode = msgspec.json.Decoder(Job).decode
    for line in sys.stdin:
        _write(answers, do(party, decode(line)))


def do(party: Party, job: Job) -> list[Time]:
    """The times of a job."""
    party.use_threads(job.num_threads)
    if not job.num_sequences:
        return [_timed(party.prefill)]
    return [_timed(lambda: party.step(job.num_sequences)) for _ in range(1 + _STEPS)][1:]


def _timed(work: Callable[[], None]) -> Time:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return Time(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def _write(file: IO[str], value: object) -> None:
    print(msgspec.json.encode(value).decode(), file=file, flush=True)


A = TypeVar("A")


class Child:
    """A party at work. ``hello`` is what it said when it was ready."""

    def __init__(self, module: str, process: subprocess.Popen[str]) -> None:
        self._module, self._process = module, process
        self.hello = self._read(Hello)

    def do(self, job: Job) -> list[Time]:
        """The times of a job. Raises: BenchError if the party has ended."""
        assert self._process.stdin is not None
        try:
            _write(self._process.stdin, job)
        except BrokenPipeError:
            pass  # it ended before it read the job: there is no answer either
        return self._read(list[Time])

    def _read(self, kind: type[A]) -> A:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise BenchError(f"{self._module} ended with status {self._process.wait()} before it answered")
        return msgspec.json.decode(line, type=kind)


@contextmanager
def started(module: str, arguments: Sequence[str], environ: Mapping[str, str]) -> Iterator[Child]:
    """A party, ready. Raises: BenchError if it ends before."""
    command = [sys.executable, "-m", f"mmrt_lab.peers.{module}", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**environ}) as process:
        try:
            yield Child(module, process)
        finally:
            process.kill()
