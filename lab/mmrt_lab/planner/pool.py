"""Processes that simulate side by side: a simulation keeps one core busy."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any


@contextmanager
def workers(num_workers: int, begin: Callable[..., None], *arguments: Any) -> Iterator[Executor]:
    """So many processes, each of which first calls ``begin`` with these arguments; one is this process. Calls that have not begun by
    the end are dropped."""
    if num_workers == 1:
        begin(*arguments)
        yield _Inline()
        return
    pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), _begin, (begin, arguments))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(begin: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word
    begin(*arguments)


class _Inline(Executor):
    """Makes each call at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # as an executor does: it is raised where the result is asked for
            future.set_exception(error)
        return future
