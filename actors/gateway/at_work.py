"""Say in a request's record while it is worked on: if the gateway dies meanwhile, its successor blames that request alone.

The record is a connection's, or that of an answer that goes on without one. Its handler runs in steps between which the loop does other
work, so each step is marked for itself. What a handler gives to a thread is marked beside it. Two threads at work at a death are both
blamed: a successor tries the blamed ones one at a time.
"""

from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from functools import wraps
from types import coroutine
from typing import Any, ParamSpec, Protocol, TypeVar

from ...shm.workplace import Workplace

P = ParamSpec("P")
T = TypeVar("T")


class Marks(Protocol):
    """The part of a record that says where its request is worked on."""

    def set_at_work(self, place: Workplace, is_at_work: bool) -> None: ...
    def is_at_work(self, place: Workplace) -> bool: ...


class Work:
    """The work on one request, until it ``is_over``: then its record may be of another request, or another connection's."""

    def __init__(self, record: Marks) -> None:
        self._record = record
        self.is_over = False

    def take(self) -> bool:
        """Return whether a gateway was at work when it died, and forget it."""
        was_at_work = any([self._record.is_at_work(place) for place in Workplace])
        for place in Workplace:
            self._record.set_at_work(place, False)
        return was_at_work

    def retire(self) -> None:
        """End it: what goes on of the request, in a task or a thread, is not the next one's work."""
        self.is_over = True
        for place in Workplace:
            self._record.set_at_work(place, False)

    def do(self, function: Callable[[], T], place: Workplace = Workplace.LOOP) -> T:
        """Return what the function does, marked as work."""
        if self.is_over:
            return function()
        was_at_work = self._record.is_at_work(place)
        self._record.set_at_work(place, True)
        try:
            return function()
        finally:
            if not self.is_over:
                self._record.set_at_work(place, was_at_work)


_current: ContextVar[Work | None] = ContextVar("current", default=None)


async def in_steps(work: Work, handling: Coroutine[Any, Any, T]) -> T:
    """Run the handler of a request, each of its steps marked. In a task of its own, whose context it changes."""
    _current.set(work)
    return await _steps(work, handling)


@coroutine
def _steps(work: Work, handling: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    steps = handling.__await__()
    step: Callable[[], Any] = steps.__next__
    while True:
        try:
            awaited = work.do(step)
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            got = yield awaited
        except GeneratorExit:
            steps.close()
            raise
        except BaseException as error:
            step = lambda error=error: steps.throw(error)  # type: ignore[misc]  # noqa: E731
        else:
            step = lambda got=got: steps.send(got)  # type: ignore[misc]  # noqa: E731


def in_thread(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function to give to a thread: it is marked there as work on the current request."""
    work = _current.get()
    if work is None:
        return function

    @wraps(function)
    def marked(*args: P.args, **kwargs: P.kwargs) -> T:
        return work.do(lambda: function(*args, **kwargs), Workplace.THREAD)

    return marked
