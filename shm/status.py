"""Status words of every process, readable by ``mmrt status``, the watchdog and /metrics even after its death.

``ActorTable``: a row of words per actor, whose only writer is the generation that holds the role lock. Actors that come while the run
lives get rows behind the others, and keep them.

Whether an actor computes is a mutex behind its words, which it holds meanwhile and nobody waits for: the kernel clears it when the
process dies, whatever killed it (``robust_mutex``). Others read the word in which the mutex has its holder.
"""

import enum
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from .fence import fence
from .robust_mutex import HOLDER, NUM_BYTES, RobustMutex, make_mutex
from .run_directory import RunDirectory
from .segment import PAGE_BYTES, Field, Layout, Segment

_ACTORS_KIND = "actors"
_NAME_BYTES = 32
_ROW_WORDS = 16
_STATE, _PID, _STARTED, _PLAN, _START, _DEADLINE, _STEPS, _BUSY, _DEPTH, _RAISED, _OOM_KILLS, _CRASHES, _COST, _DEBUGGED = range(14)
_GUESSES, _BORROWED = 14, 15
_COMPUTES = _ROW_WORDS  # the mutex follows the row's words
_OWN_WORDS = _ROW_WORDS + NUM_BYTES // 8
_MAX_ACTORS = 64
_READ_ATTEMPTS = 100
_HALF_WORD = (1 << 32) - 1


class Membership(enum.IntEnum):
    """Whether an actor belongs to the run. Changed by whoever starts and stops actors: the supervisor."""

    NEVER = 0
    PRESENT = 1
    LEAVING = 2  # it gets no more work, and goes once it has none
    GONE = 3


class ActorState(enum.IntEnum):
    """The state that an actor generation reports. A dead one cannot report: look at its pid and role lock."""

    ABSENT = 0  # this row was never written
    STARTING = 1
    ACTIVE = 2
    STOPPING = 3


_STATES = frozenset(ActorState)


@dataclass(frozen=True, slots=True)
class ActorReading:
    """One look at an actor's row. Times are CLOCK_MONOTONIC nanoseconds; ``step_deadline_ns`` 0: no step is running."""

    actor: str
    state: ActorState
    generation: int
    pid: int
    started_ns: int
    step_plan: int
    step_start_ns: int
    step_deadline_ns: int
    steps: int
    busy_ns: int
    queue_depth: int
    raised: bool = False  # the step was left by an exception: it stands, since the process is about to end
    oom_kills: int = 0  # the machine's counter when the generation became active
    crashes: int = 0  # recent crashes of earlier generations, in unknown work
    step_cost_ns: int = 0  # see ``ActorStatus.set_step_cost``
    debugged: bool = False  # it ran under a debugger
    num_guesses: int = 0  # that decode has checked (modulo 2^32, as the next one)
    num_right_guesses: int = 0
    borrowed_ns: int = 0  # of cores beyond its share, which others left idle

    def is_overdue(self, now_ns: int) -> bool:
        """Return whether a step has run past its declared deadline."""
        return 0 < self.step_deadline_ns < now_ns


class ActorTable:
    """Row = 16 words on a page of its own, which its actor alone maps for writing; the first is generation << 8 | state, cleared before
    a new generation writes the others. Besides, a word of each actor: number of its device << 8 | membership.

    The place of an actor is its number in plans and records, for as long as the run lives.
    """

    def __init__(self, segment: Segment) -> None:
        """Use ``create`` or ``attach``."""
        places = _actor_layout()
        segment.expect_bytes(places.num_bytes)
        self._segment = segment
        self._names, self._rows = places.names, places.rows
        self._own: dict[str, NDArray[np.uint64]] = {}
        self._version, self._memberships = places.version // 8, places.memberships // 8
        self._seen = -1
        self._found: tuple[str, ...] = ()

    @classmethod
    def create(cls, run: RunDirectory, actors: Sequence[str], devices: Mapping[str, int] | None = None) -> Self:
        """Make the table. ``devices``: of the actors; 0 where not given.

        Raises: SpaceError, FileExistsError, ValueError; OSError where the C library has no robust mutexes.
        """
        path = run.segment_path("actors")
        segment = Segment.create(path, _actor_layout().num_bytes, kind=_ACTORS_KIND, publish=False)
        try:
            table = cls(segment)
            for number in range(_MAX_ACTORS):
                make_mutex(segment.field(Field(table._rows + number * PAGE_BYTES + 8 * _COMPUTES, (NUM_BYTES,), np.dtype(np.uint8))))
            for name in actors:
                table.set_membership(name, Membership.PRESENT, (devices or {}).get(name, 0))
            segment.publish()
            return table
        except BaseException:
            segment.close()
            raise

    @classmethod
    def attach(cls, run: RunDirectory, writable: bool = False) -> Self:
        """Map the table. ``writable``: for changes of who belongs to the run. Raises: MissingError, SegmentError."""
        return cls(Segment.attach(run.segment_path("actors"), kind=_ACTORS_KIND, writable=writable))

    def close(self) -> None:
        """Unmap."""
        self._segment.close()

    @property
    def version(self) -> int:
        """Grows with each change of who belongs to the run."""
        return int(self._segment.words[self._version])

    @property
    def actors(self) -> tuple[str, ...]:
        """All actors that belong to the run or did once, by number."""
        if (version := self.version) != self._seen:
            fence()
            self._found = tuple(self._name(number) for number in range(_MAX_ACTORS) if self._membership(number))
            self._seen = version
        return self._found

    @property
    def present(self) -> tuple[str, ...]:
        """The actors that belong to the run now, by number."""
        return tuple(actor for number, actor in enumerate(self.actors) if self._membership(number) != Membership.GONE)

    @property
    def leaving(self) -> tuple[str, ...]:
        """Those of them that get no more work."""
        return tuple(actor for number, actor in enumerate(self.actors) if self._membership(number) == Membership.LEAVING)

    @property
    def devices(self) -> dict[str, int]:
        """The device of each of ``actors``."""
        return {actor: int(self._segment.words[self._memberships + number]) >> 8 for number, actor in enumerate(self.actors)}

    def set_membership(self, actor: str, membership: Membership, device: int | None = None) -> None:
        """Let an actor join or leave; one that is new gets the next number. ``device``: as before where not given, at first 0. One
        writer only. Raises: ValueError for a bad name, or if the table is full."""
        if not actor or len(actor.encode()) > _NAME_BYTES:
            raise ValueError(f"an actor's name has 1 to {_NAME_BYTES} bytes, not {actor!r}")
        known = self.actors
        number = known.index(actor) if actor in known else len(known)
        if number == _MAX_ACTORS:
            raise ValueError(f"a run has at most {_MAX_ACTORS} actors")
        if number == len(known):
            start = self._names + number * _NAME_BYTES
            self._segment.buf[start : start + _NAME_BYTES] = actor.encode().ljust(_NAME_BYTES, b"\0")
            fence()
        word = self._memberships + number
        device = int(self._segment.words[word]) >> 8 if device is None else device
        self._segment.words[word] = device << 8 | membership
        fence()
        self._segment.words[self._version] += 1

    def _name(self, number: int) -> str:
        start = self._names + number * _NAME_BYTES
        return bytes(self._segment.buf[start : start + _NAME_BYTES]).rstrip(b"\0").decode()

    def _membership(self, number: int) -> int:
        return int(self._segment.words[self._memberships + number]) & 0xFF

    def writer(self, actor: str, generation: int) -> "ActorStatus":
        """Take over an actor's row, cleared, in state STARTING. The caller holds the role lock.

        Raises: ValueError for an actor that is not in the table.
        """
        if actor not in self._own:
            row = Field(self._row(actor) * 8, (_OWN_WORDS,), np.dtype(np.uint64))
            self._own[actor] = self._segment.part_to_write(row)
        return ActorStatus(self._own[actor], generation)

    def lookout(self, actors: Sequence[str]) -> Callable[[], int]:
        """Return a function that tells which of these actors compute now: bit i for the i-th. It takes about 0.1 µs for each.

        Raises: ValueError for an actor that is not in the table.
        """
        words = self._segment.words
        places = [(1 << index, self._row(actor) + _COMPUTES) for index, actor in enumerate(actors)]

        def look() -> int:
            found = 0
            for bit, place in places:
                if words[place] & HOLDER:
                    found |= bit
            return found

        return look

    def read(self, actor: str) -> ActorReading:
        """Look at an actor's row. Raises: ValueError for an actor that is not in the table."""
        words = self._segment.words
        start = self._row(actor)
        for _ in range(_READ_ATTEMPTS):
            row = words[start : start + _ROW_WORDS].tolist()
            fence()
            again = words[start + _STATE], words[start + _PLAN], words[start + _DEADLINE]
            if again == (row[_STATE], row[_PLAN], row[_DEADLINE]):
                break
        return ActorReading(
            actor=actor,
            state=_known_state(row[_STATE] & 0xFF),
            generation=row[_STATE] >> 8,
            pid=row[_PID],
            started_ns=row[_STARTED],
            step_plan=row[_PLAN],
            step_start_ns=row[_START],
            step_deadline_ns=row[_DEADLINE],
            steps=row[_STEPS],
            busy_ns=row[_BUSY],
            queue_depth=row[_DEPTH],
            raised=bool(row[_RAISED]),
            oom_kills=row[_OOM_KILLS],
            crashes=row[_CRASHES],
            step_cost_ns=row[_COST],
            debugged=bool(row[_DEBUGGED]),
            num_guesses=row[_GUESSES] >> 32,
            num_right_guesses=row[_GUESSES] & _HALF_WORD,
            borrowed_ns=row[_BORROWED],
        )

    def _row(self, actor: str) -> int:
        if actor not in self.actors:
            raise ValueError(f"no actor {actor!r} in this run (there are {', '.join(self.actors)})")
        return (self._rows + self.actors.index(actor) * PAGE_BYTES) // 8


class ActorStatus:
    """The words of one actor generation, written by it alone. A call is well under a microsecond."""

    def __init__(self, own: NDArray[np.uint64], generation: int) -> None:
        """Use ``ActorTable.writer``."""
        self._words = words = own[:_ROW_WORDS].data.cast("B").cast("Q")
        mutex = own[_COMPUTES:].view(np.uint8)
        mutex[:] = 0  # a process that was taken over can have written any; and Linux clears none where its memory went first
        make_mutex(mutex)
        self._computing = RobustMutex(mutex)
        self._generation = generation
        words[_STATE] = 0
        fence()
        for index in range(1, _ROW_WORDS):
            words[index] = 0
        words[_PID] = os.getpid()
        words[_STARTED] = time.monotonic_ns()
        self.set_state(ActorState.STARTING)

    def set_state(self, state: ActorState) -> None:
        """Set this generation's state."""
        fence()
        self._words[_STATE] = self._generation << 8 | state

    @contextmanager
    def step(self, plan_id: int, deadline_s: float) -> Iterator[None]:
        """Declare a step that takes at most ``deadline_s``; past it the watchdog kills the process.

        A step left by an exception ends the process, and stands: the next generation sees what its predecessor died in.
        """
        self.begin_step(plan_id, deadline_s)
        try:
            yield
        except BaseException:
            self._words[_RAISED] = 1
            raise
        self.end_step()

    def begin_step(self, plan_id: int, deadline_s: float) -> None:
        """The first half of ``step``. Deadline last: it says that there is a step."""
        words = self._words
        now_ns = time.monotonic_ns()
        words[_PLAN] = plan_id
        words[_START] = now_ns
        fence()
        words[_DEADLINE] = now_ns + int(deadline_s * 1e9)

    @property
    def step_plan(self) -> int:
        """The plan of the declared step, or of the last one."""
        return int(self._words[_PLAN])

    @property
    def step_start_ns(self) -> int:
        """The start of the last step; CLOCK_MONOTONIC."""
        return int(self._words[_START])

    @property
    def step_deadline_ns(self) -> int:
        """The deadline of the declared step, CLOCK_MONOTONIC; 0: there is none."""
        return int(self._words[_DEADLINE])

    def end_step(self) -> None:
        """The second half of ``step``: counts it, and the time that it took."""
        words = self._words
        words[_DEADLINE] = 0
        fence()
        words[_STEPS] += 1
        words[_BUSY] += time.monotonic_ns() - words[_START]

    def postpone(self, wait_ns: int) -> None:
        """Give the declared step, if there is one, so much more time: it has waited for its turn."""
        if self._words[_DEADLINE]:
            self._words[_DEADLINE] += wait_ns

    def set_computing(self, computes: bool) -> None:
        """Say that the actor begins or ceases to compute, in the same thread. A process that dies computes no more."""
        if not computes:
            self._computing.release()
        elif not self._computing.try_acquire():
            raise RuntimeError("another thread of this actor computes")

    def set_debugged(self) -> None:
        """Say that this generation runs under a debugger: its end says nothing about its work."""
        self._words[_DEBUGGED] = 1

    def set_inheritance(self, oom_kills: int, crashes: int, step_cost_ns: int) -> None:
        """Set the findings of this generation for the next one: see ``ActorReading``."""
        self._words[_OOM_KILLS] = oom_kills
        self._words[_CRASHES] = crashes
        self._words[_COST] = step_cost_ns

    @property
    def step_cost_ns(self) -> int:
        """The cost set last, by this or an earlier generation."""
        return int(self._words[_COST])

    def set_crashes(self, crashes: int) -> None:
        """Set the number of recent crashes without a known cause."""
        self._words[_CRASHES] = crashes

    def set_step_cost(self, cost_ns: int) -> None:
        """Set the worst time for a unit of this actor's work, as measured lately. Deadlines of steps follow from it."""
        self._words[_COST] = cost_ns

    def set_guesses(self, checked: int, right: int) -> None:
        """Set how many guesses of tokens were checked and were right, in one word."""
        self._words[_GUESSES] = (checked & _HALF_WORD) << 32 | right & _HALF_WORD

    def set_borrowed(self, borrowed_ns: int) -> None:
        """Set the time of cores beyond its share that this actor had, for as long as it computed."""
        self._words[_BORROWED] = borrowed_ns

    def set_queue_depth(self, depth: int) -> None:
        """Set the amount of work that waits for this actor, in its own units."""
        self._words[_DEPTH] = depth


def _known_state(number: int) -> ActorState:
    """The state of that number; a process that was taken over can write any, and harms no reader."""
    return ActorState(number) if number in _STATES else ActorState.ABSENT


class _ActorLayout(NamedTuple):
    """Offsets of the parts, and the bytes of the segment."""

    names: int
    rows: int
    version: int
    memberships: int
    num_bytes: int


def _actor_layout() -> _ActorLayout:
    layout = Layout()
    names = layout.add((_MAX_ACTORS, _NAME_BYTES), np.uint8).offset
    version, memberships = layout.add(1, np.uint64).offset, layout.add(_MAX_ACTORS, np.uint64).offset
    rows = layout.add((_MAX_ACTORS, PAGE_BYTES), np.uint8, align=PAGE_BYTES).offset
    return _ActorLayout(names, rows, version, memberships, layout.num_bytes)
