"""Progress of prefill with its plans: a word for each, read by those who copy the K and V of a layer while the next ones are computed
(KT1).

A plan's word has the generation of the process that does it, and the number of layers whose K and V it has stored. A process that does
a plan anew says so before it writes a page; so what others have read is whole if the word had this generation before and after.
``memory`` makes the words where there are several devices, and the prefill that has a plan writes its word. In a pipeline that is the
last stage: the layers of those before it are stored when it begins. A plan keeps its word until one 256 numbers later begins.
"""

import time
from collections.abc import Callable
from typing import NamedTuple, Self

from .fence import fence
from .run_directory import RunDirectory
from .segment import HEADER_BYTES, Segment

DONE = 0xFFFF
"""Instead of a number of layers: the plan is done, and its pages are whole."""

LEAST_TOKENS = 32
"""Of a plan whose time tells that of a token."""

_KIND = "layers"
_NUM_WORDS = 256
_MAX_PREFILLS = 64  # each has a word for its speed
_NUM_BYTES = HEADER_BYTES + 8 * (_NUM_WORDS + _MAX_PREFILLS)
_EPOCH_SHIFT = 32  # of plan ids: see ``ControllerState.number``


class Progress(NamedTuple):
    """``num_layers``: from the first on, or DONE."""

    generation: int
    num_layers: int


class LayerProgress:
    """The words of all plans, and of each prefill how long a token took it in the last one."""

    def __init__(self, segment: Segment) -> None:
        """Use ``create`` or ``attach``."""
        segment.expect_bytes(_NUM_BYTES)
        self._segment = segment
        self._words = segment.words[HEADER_BYTES // 8 :]

    @classmethod
    def create(cls, run: RunDirectory) -> Self:
        """Make them. Raises: SpaceError, FileExistsError."""
        return cls(Segment.create(run.segment_path("layers"), _NUM_BYTES, kind=_KIND))

    @classmethod
    def attach(cls, run: RunDirectory, writable: bool = False) -> Self:
        """Map them. Raises: MissingError, SegmentError."""
        return cls(Segment.attach(run.segment_path("layers"), kind=_KIND, writable=writable))

    def close(self) -> None:
        """Unmap."""
        self._words.release()
        self._segment.close()

    def write(self, plan_id: int, progress: Progress) -> None:
        """Say how far a plan is. All that this vouches for has been written."""
        fence()
        word = _name(plan_id) << 32 | (progress.generation & 0xFFFF) << 16 | progress.num_layers
        self._words[plan_id % _NUM_WORDS] = word
        fence()

    def read(self, plan_id: int) -> Progress | None:
        """Return how far a plan is; None if nobody has begun it, or a later one has its word."""
        fence()
        word = self._words[plan_id % _NUM_WORDS]
        fence()
        return Progress(word >> 16 & 0xFFFF, word & 0xFFFF) if word >> 32 == _name(plan_id) else None

    def set_token_ns(self, number: int, token_ns: int) -> None:
        """Say how long a token takes this prefill, by its number."""
        self._words[_NUM_WORDS + number % _MAX_PREFILLS] = token_ns

    @property
    def token_s(self) -> float:
        """The seconds of a token in the slowest prefill; 0: none has done any."""
        return max(self._words[_NUM_WORDS : _NUM_WORDS + _MAX_PREFILLS]) / 1e9


class LayerCounter:
    """Counts the layers of the plan that a prefill does, and takes its time."""

    def __init__(self, words: LayerProgress, generation: int, number: int = 0, first: int = 0, share: float = 1.0) -> None:
        """``generation``: of this process. ``number``: of its actor. ``first``: of the layers that it does; those before it are stored
        when a plan begins. ``share``: how much of the model these layers are."""
        self._words, self._generation, self._number, self._first, self._share = words, generation, number, first, share
        self._plan_id = self._num_layers = self._began_ns = 0

    def begin(self, plan_id: int) -> None:
        """Call it before the plan's first page is written."""
        self._plan_id, self._began_ns = plan_id, time.monotonic_ns()
        self._note(self._first)

    def stored(self) -> None:
        """Note that K and V of one more layer are stored."""
        self._note(self._num_layers + 1)

    def before(self, pause: Callable[[], object] | None) -> Callable[[], object]:
        """Return what is to be called between layers: ``stored``, and then ``pause``."""
        if pause is None:
            return self.stored

        def after_layer() -> None:
            self.stored()
            pause()

        return after_layer

    def done(self, num_tokens: int = 0) -> None:
        """Note that the plan of so many tokens is done. Call it before it is answered."""
        if num_tokens >= LEAST_TOKENS:
            self._words.set_token_ns(self._number, int((time.monotonic_ns() - self._began_ns) / num_tokens / self._share))
        self._note(DONE)

    def _note(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._words.write(self._plan_id, Progress(self._generation, num_layers))


def _name(plan_id: int) -> int:
    """Return 32 bits that tell a plan from the others that may have had its word."""
    return (plan_id >> _EPOCH_SHIFT & 0xFF) << 24 | plan_id & 0xFFFFFF
