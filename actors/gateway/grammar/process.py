"""The gateway's grammar process: compiles what clients send, so that one of them can cost at most this process.

``python -m mmrt.actors.gateway.grammar.process MODEL [OPEN]`` answers on its standard output, in frames, to the sources on its
standard input. It ends with them, or with the gateway. A source has ``CPU_S`` of a processor and ``MEMORY_BYTES``: the kernel ends a
process that takes more time, and one that gets no more memory aborts. The gateway's end is ``checks``.
"""

import ctypes
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from ....models.config import load_model_config
from ....models.errors import GrammarError
from ....models.grammar.json_schema import find_fault
from ....models.grammar.matcher import Matcher, Matchers
from ....models.grammar.source import GrammarSource
from ....models.grammar.text import grammar_text, held_text, schemas_of
from ....models.grammar.vocabulary import GrammarVocabulary, load_vocabulary, num_words
from .checks import CPU_S, LENGTH, MEMORY_BYTES, OPEN, READY, Verdict, frame

# decode compiles a grammar once more, and takes its steps, while other answers wait.
MAX_COMPILE_S = 0.25
MAX_STEP_S = 0.1
MAX_SEARCH_S = 0.5  # for the place of a fault
_NUM_STEPS = 48
_PR_SET_PDEATHSIG = 1


def main(model_path: Path, is_open: bool) -> None:
    """Answer until the input ends. ``is_open``: as of ``hold``."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    compiler = Compiler(load_vocabulary(model_path, load_model_config(model_path)), is_open)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    data_pages = int(Path("/proc/self/statm").read_text().split()[5])
    _limit(resource.RLIMIT_DATA, data_pages * resource.getpagesize() + MEMORY_BYTES)
    _answer(target, READY)
    while data := _read(source):
        _limit(resource.RLIMIT_CPU, int(time.process_time() + CPU_S) + 1)
        try:
            verdict = compiler.judge(msgspec.msgpack.decode(data, type=GrammarSource))
        except MemoryError:
            os.abort()  # as llguidance does
        except Exception:  # a defect of ours
            verdict = Verdict(failure=traceback.format_exc())
        _answer(target, msgspec.msgpack.encode(verdict))


class Compiler:
    """Judges sources."""

    def __init__(self, vocabulary: GrammarVocabulary, is_open: bool = False) -> None:
        """``is_open``: as of ``hold``."""
        self._vocabulary = vocabulary
        self._is_open = is_open
        self._mask = np.empty(num_words(vocabulary.vocab_size), np.int32)

    def judge(self, source: GrammarSource) -> Verdict:
        """Compile a source and write the beginning of an answer, which finds most of what would go wrong later."""
        try:
            held = held_text(source, is_open=self._is_open)
            self._walk(self._begin(held.text))
        except GrammarError as error:
            if error.pointer:
                return Verdict(error=error.message, pointer=error.pointer)
            pointer, message = self._find_fault(source)
            return Verdict(error=message or error.message, pointer=pointer)
        return Verdict(held.text, dropped=[(one.pointer, one.reason) for one in held.dropped])

    def _find_fault(self, source: GrammarSource) -> tuple[str, str]:
        """Return where a schema of the source is faulty and why, as far as this is known after ``MAX_SEARCH_S``."""
        until_s = time.process_time() + MAX_SEARCH_S
        for place, schema in schemas_of(source):
            pointer, message = find_fault(schema, lambda part: self._error_of(part) if time.process_time() < until_s else "")
            if message:
                return place + pointer, message
        return "", ""

    def _begin(self, grammar: str) -> Matcher:
        began_s = time.process_time()
        matcher = Matchers(self._vocabulary, max_kept=1).begin(grammar)
        self._fill(matcher)
        _check_time("its compilation", time.process_time() - began_s, MAX_COMPILE_S)
        return matcher

    def _walk(self, matcher: Matcher) -> None:
        """Take tokens at random, always the same ones of a grammar."""
        choice = random.Random(0)
        for _ in range(_NUM_STEPS):
            allowed = np.flatnonzero(np.unpackbits(self._mask.view(np.uint8), bitorder="little"))
            matcher.take(int(choice.choice(allowed)))
            if matcher.is_complete:
                return
            began_s = time.process_time()
            self._fill(matcher)
            _check_time(f"its token {matcher.count + 1}", time.process_time() - began_s, MAX_STEP_S)

    def _fill(self, matcher: Matcher) -> None:
        matcher.fill(self._mask)
        matcher.check()

    def _error_of(self, schema: object) -> str:
        try:
            self._begin(grammar_text(GrammarSource("json_schema", json.dumps(schema)), is_open=self._is_open))
        except GrammarError as error:
            return error.message
        return ""


def _check_time(what: str, took_s: float, limit_s: float) -> None:
    if took_s > limit_s:
        raise GrammarError(f"{what} takes {took_s:.2f} s of a processor, the limit is {limit_s} s")


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _read(source: BinaryIO) -> bytes:
    """The next frame, empty at the end."""
    head = source.read(LENGTH.size)
    return source.read(*LENGTH.unpack(head)) if len(head) == LENGTH.size else b""


def _answer(target: BinaryIO, data: bytes) -> None:
    target.write(frame(data))
    target.flush()


if __name__ == "__main__":
    os.umask(0o077)
    main(Path(sys.argv[1]), is_open=OPEN in sys.argv[2:])
