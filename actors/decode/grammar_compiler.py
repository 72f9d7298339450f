"""Compiles the grammars of rows in a thread, while decode's steps go on. Used by decode's loop.

llguidance compiles without Python's lock, but copies the vocabulary with it: 0.4 s for 152,000 tokens, in which no step begins. So
that is best done before a process serves, or while nothing runs.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher

from ...models.grammar.matcher import Matcher, Matchers

_MAX_DONE = 64


class GrammarCompiler:
    """One thread, and what it has compiled. Use it from the loop's thread only."""

    def __init__(self, load: Callable[[], Matchers], wake: Callable[[], None]) -> None:
        """``load`` copies the vocabulary; ``wake`` is called when a grammar is compiled. The thread calls both."""
        self._load = load
        self._wake = wake
        self._matchers: Future[Matchers] | None = None
        self._jobs: dict[str, Future[LLMatcher]] = {}
        self._num_done = self._num_seen = 0
        self._thread = ThreadPoolExecutor(1, "grammars")

    def prepare(self) -> Future[Matchers]:
        """Begin to copy the vocabulary, once. If that fails, so does every row with a grammar."""
        if self._matchers is None:
            self._matchers = self._thread.submit(self._load)
        return self._matchers

    def begin(self, grammar: str) -> Matcher | None:
        """Return the matcher of an answer without ids; None while the grammar is being compiled, which this call begins.

        Raises: GrammarError if it does not compile, and whatever ``load`` raises.
        """
        job = self._jobs.get(grammar)
        if job is None:
            matchers = self.prepare()
            if matchers.done() and (kept := matchers.result().begin_kept(grammar)) is not None:
                return kept
            job = self._submit(matchers, grammar)
        if not job.done():
            return None
        del self._jobs[grammar]
        return self.prepare().result().keep(grammar, job.result())

    def take_news(self) -> bool:
        """Return whether a grammar has been compiled since the last call."""
        seen, self._num_seen = self._num_seen, self._num_done
        return seen != self._num_seen

    def close(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _submit(self, matchers: Future[Matchers], grammar: str) -> Future[LLMatcher]:
        done = [one for one, job in self._jobs.items() if job.done()]
        for one in done[: max(0, len(done) - _MAX_DONE)]:  # their rows have gone
            del self._jobs[one]
        job = self._jobs[grammar] = self._thread.submit(lambda: matchers.result().compile(grammar))
        job.add_done_callback(self._note)
        return job

    def _note(self, job: Future[LLMatcher]) -> None:
        if not job.cancelled():
            self._num_done += 1
            self._wake()
