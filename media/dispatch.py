"""The decisions of ``decoding``, without its threads: the next segment of an engine and the next frame of a request's taker.

Stall-free scheduling (FC7, Algorithm 2; FC9): the segments of all requests are in one queue, and an engine that becomes free gets
the next one at once. The current request goes first, so that its frames are complete soonest and few requests hold memory: the oldest
of those whose takers wait, then the oldest of all. A request with no waiting taker also makes way within a segment; otherwise a
long video would delay another's frames for its whole decoding time. Two things differ from the printed algorithm.
Its test ``num_nvdec_in_use <= N`` starts a decode while N are under way, N + 1 in all: an off-by-one; here a segment starts only
when one of the N engines asks for it. And a segment that finds all engines busy waits in the ``else`` of that test, after which the
loop goes on with the *next* one and it is never decoded; here it stays in the queue.

Frames are held until they are taken, and memory for one is only there once it has been decoded (FC8). A request may be ahead of its
taker by ``max_ahead`` segments and ``max_bytes_ahead`` bytes. Over that, a segment is *parked*: its decoder keeps its state, the engine
does something else, and any engine of the kind goes on with it later. So nothing ever waits for an absent taker. The segment
that the taker needs next may always go on when the taker has nothing left to take, so there is no deadlock, either. No more than
``max_running`` engines decode a request at once, and it has no more decoders than that: while a segment is parked no other is begun.

Nothing here is thread-safe: the caller holds a lock.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from .engines import Output
from .errors import MediaError
from .segments import Segment


class State(Enum):
    WAITING = auto()
    RUNNING = auto()
    PARKED = auto()
    DONE = auto()
    DROPPED = auto()  # its request is cancelled, has failed, or was planned again from here on


class Absent(Enum):
    """The reason that there is no frame."""

    PENDING = auto()  # not decoded yet
    ENDED = auto()


@dataclass(eq=False)
class Request:
    """A video whose wanted frames are taken in order, the i-th of them ``repeats[i]`` times."""

    repeats: Sequence[int]
    kind: str  # of the engines that decode it
    max_running: int  # of these engines at once
    runs: list["Run"] = field(default_factory=list)  # not yet taken in full, in order
    next_position: int = 0  # the taker's next position
    last: Output | None = None  # the taker's last frame
    num_repeats: int = 0  # repeats of ``last`` still to come
    num_bytes: int = 0  # of frames not taken
    num_running: int = 0
    is_awaited: bool = False  # its taker asked for a frame that was not there
    error: Exception | None = None


@dataclass(eq=False)
class Run:
    """A segment being decoded. ``due`` is the first of its frames that has not been delivered."""

    request: Request
    segment: Segment
    due: int
    stop: int
    state: State = State.WAITING
    frames: deque[tuple[int, Output]] = field(default_factory=deque)  # (position, frame), not taken


class Dispatch:
    """The queue. An engine gets a run from ``next_run``, reports its progress, and releases it with ``leave``."""

    def __init__(self, max_ahead: int, max_bytes_ahead: int) -> None:
        if max_ahead < 2:
            raise ValueError(f"max_ahead of {max_ahead} is below 2: the segment that is being taken and the next one")
        self._max_ahead = max_ahead
        self._max_bytes_ahead = max_bytes_ahead
        self._requests: list[Request] = []

    @property
    def requests(self) -> tuple[Request, ...]:
        """Requests that are not cancelled, oldest first."""
        return tuple(self._requests)

    def add(self, segments: Sequence[Segment], repeats: Sequence[int], kind: str, max_running: int) -> Request:
        """Add a request at the end of the queue, for at most so many engines of this kind at once."""
        request = Request(repeats, kind, max_running)
        request.runs = _runs(request, segments)
        self._requests.append(request)
        return request

    def next_run(self, kind: str) -> Run | None:
        """The run for an idle engine of this kind: the current request's earliest segment that may go on."""
        for request in sorted(self._requests, key=lambda request: not request.is_awaited):
            if request.kind == kind and (run := self._next_of(request)) is not None:
                run.state = State.RUNNING
                request.num_running += 1
                return run
        return None

    def _makes_way(self, mine: Request) -> bool:
        """True if another request has a waiting taker and no engine."""
        return not mine.is_awaited and any(
            request.is_awaited and request.kind == mine.kind and not request.num_running and self._next_of(request) is not None
            for request in self._requests
        )

    def _next_of(self, request: Request) -> Run | None:
        if request.num_running >= request.max_running:
            return None
        has_room = request.num_bytes < self._max_bytes_ahead
        for number, run in enumerate(request.runs[: self._max_ahead]):
            may_go_on = has_room or (number == 0 and not run.frames)
            if may_go_on and run.state in (State.WAITING, State.PARKED):
                return run
        return None

    def deliver(self, run: Run, position: int, frame: Output) -> bool:
        """Deliver a running segment's next frame. Returns True if the engine goes on with it; else it is now parked, or was dropped.

        After its last frame it goes on to finish: if parked, nothing would refer to it once that frame is taken.
        """
        if run.state is not State.RUNNING:
            return False
        run.frames.append((position, frame))
        run.due = position + 1
        run.request.num_bytes += frame.nbytes
        is_full = run.request.num_bytes >= self._max_bytes_ahead
        if run.due < run.stop and (is_full or self._makes_way(run.request)):
            run.state = State.PARKED
        return run.state is State.RUNNING

    def finish(self, run: Run) -> None:
        """Mark a running segment as having delivered everything."""
        if run.state is State.RUNNING:
            run.state = State.DONE

    def replan(self, run: Run, segments: Sequence[Segment], kind: str, max_running: int) -> list[Run]:
        """Replace this running segment by these, from its first undelivered frame to the end of the request, as in ``add``.

        Returns the dropped runs.
        """
        if run.state is not State.RUNNING:
            return []
        run.state, run.stop = State.DONE, run.due
        request = run.request
        keep = request.runs.index(run) + 1 if run in request.runs else 0  # all of it may have been taken
        dropped = _drop(request.runs[keep:])
        request.runs[keep:] = _runs(request, segments)
        request.kind, request.max_running = kind, max_running
        _pop_taken(request)
        return dropped

    def fail(self, run: Run, error: Exception) -> list[Run]:
        """Fail the request of this running segment; its taker gets the error. Returns the dropped runs."""
        return self._end(run.request, error) if run.state is State.RUNNING else []

    def leave(self, run: Run) -> None:
        """Release this run: its engine has stopped working on it."""
        run.request.num_running -= 1

    def cancel(self, request: Request) -> list[Run]:
        """Cancel the request. Returns the dropped runs; engines are through with them at ``num_running`` 0."""
        if request not in self._requests:
            return []
        self._requests.remove(request)
        return self._end(request, ValueError("the decoding request is cancelled"))

    @staticmethod
    def _end(request: Request, error: Exception) -> list[Run]:
        dropped, request.runs, request.error = _drop(request.runs), [], error
        return dropped

    def take(self, request: Request) -> Output | Absent:
        """The next frame in order. One that was not delivered is replaced by the one before it, or by the first that follows.

        Raises: the error of the request, MediaError (422) if there is no frame at all.
        """
        if request.num_repeats and request.last is not None:
            request.num_repeats -= 1
            return request.last
        if request.next_position == len(request.repeats):
            return Absent.ENDED
        if request.error is not None:
            raise request.error
        frame = _take_distinct(request)
        request.is_awaited = frame is None
        if frame is None:
            return Absent.PENDING
        request.num_repeats = request.repeats[request.next_position] - 1
        request.next_position += 1
        request.last = frame
        _pop_taken(request)
        return frame


def is_next(run: Run) -> bool:
    """True if this run's delivered frame may be its taker's next. A taker that has got nothing yet may get any frame."""
    return run.request.last is None or not run.request.runs or run is run.request.runs[0]


def _runs(request: Request, segments: Sequence[Segment]) -> list[Run]:
    return [Run(request, segment, segment.start, segment.stop) for segment in segments]


def _drop(runs: list[Run]) -> list[Run]:
    for run in runs:
        run.state = State.DROPPED
        run.request.num_bytes -= sum(frame.nbytes for _, frame in run.frames)
        run.frames.clear()
    return runs


def _pop_taken(request: Request) -> None:
    while request.runs and request.runs[0].stop <= request.next_position:
        request.runs.pop(0)


def _take_distinct(request: Request) -> Output | None:
    """Take the next distinct frame; None if it may still come."""
    head = request.runs[0]
    if head.frames and head.frames[0][0] == request.next_position:
        frame = head.frames.popleft()[1]
        request.num_bytes -= frame.nbytes
        return frame
    if not head.frames and head.state is not State.DONE:
        return None
    return request.last if request.last is not None else _first_frame(request)


def _first_frame(request: Request) -> Output | None:
    """The first frame there is; None if it may still come. Raises: MediaError if none does."""
    for run in request.runs:
        if run.frames:
            return run.frames[0][1]
        if run.state is not State.DONE:
            return None
    raise MediaError("no frame of the video can be decoded")
