"""Check a plan against the rules of the core (pure). A policy can be slow or unfair, never wrong: illegal choices are dropped.

Credit is not overdrawn; pages are not given twice and a request keeps to its share of a pool; segments are taken in prompt order,
chunks continue after the prefilled tokens and end where media are ready (RS4), on the view's grid; batches keep to their limits;
suspects run alone. Ends within pictures that a chunk must hold are moved, not refused.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, takewhile
from typing import TypeVar

from .types import MAX_PARTS, ChunkChoice, ItemChoice, RequestView, SegmentChoice, SegmentStage, SegmentView, StepLimits, StepPlan, View
from .video_rooms import VideoRooms

Requests = Mapping[int, RequestView]
Choice = TypeVar("Choice", ItemChoice, SegmentChoice, ChunkChoice)
VideoChoice = TypeVar("VideoChoice", ItemChoice, SegmentChoice)

_NOTHING = StepPlan()


def check(view: View, limits: StepLimits, plan: StepPlan) -> tuple[StepPlan, int]:
    """Return the plan without its illegal choices, and their number. A malformed plan can raise any exception."""
    plan = _rebuilt(plan)
    if plan is _NOTHING or not plan:
        return plan, 0
    requests = {request.key: request for request in view.requests}
    rooms = VideoRooms(view)
    analyse = _with_room(rooms, requests, _analyses(plan.analyse, requests, view.video_credit))
    preprocess = _preprocess(view, requests, plan.preprocess, view.video_credit - len(analyse)) if plan.preprocess else []
    preprocess = _with_room(rooms, requests, preprocess)
    encode = _encode(view, requests, plan.encode, limits.max_encode_rows) if plan.encode and view.encoder_credit > 0 else []
    prefill = _chunks(plan.prefill if view.prefill_credit > 0 else (), requests, limits.max_prefill_tokens, view.grid)
    legal = StepPlan(tuple(analyse), tuple(preprocess), tuple(encode), tuple(prefill))
    return legal, _num_choices(plan) - _num_choices(legal)


def may_take(num_pages: int, num_free: int, held: int, need: int, has_kv: bool) -> bool:
    """Enforce shares of the patch and the embedding pool. One request gets at most half, which keeps its stages busy; requests without
    KV pages leave half free for requests that have them, which prevents deadlock."""
    return fits_share(num_pages, held, need) and (has_kv or num_free - need >= num_pages // 2)


def fits_share(num_pages: int, held: int, need: int) -> bool:
    """Return whether a request that holds pages of a pool may have more: half of the pool, but whatever it needs at once."""
    return not held or held + need <= num_pages // 2


def _rebuilt(plan: StepPlan) -> StepPlan:
    """Return a plan of these types and of nothing else: a policy's own may change, or run its code when they are read."""
    if not isinstance(plan, StepPlan):
        raise TypeError(f"a plan is of type {type(plan).__name__}, not StepPlan")
    analyse, preprocess, encode, prefill = plan.analyse, plan.preprocess, plan.encode, plan.prefill
    if _is_empty(analyse) and _is_empty(preprocess) and _is_empty(encode) and _is_empty(prefill):
        return _NOTHING
    return StepPlan(
        _choices(ItemChoice, analyse),
        _choices(SegmentChoice, preprocess),
        _choices(SegmentChoice, encode),
        _choices(ChunkChoice, prefill),
    )


def _is_empty(given: object) -> bool:
    return type(given) is tuple and not given


def _choices(kind: type[Choice], given: Iterable[Iterable[int]]) -> tuple[Choice, ...]:
    if _is_empty(given):
        return ()
    choices = tuple([kind(*choice) for choice in given])
    for number in chain.from_iterable(choices):
        if type(number) is not int:  # a message cannot carry an int of numpy
            raise TypeError(f"{number!r} in a plan is no int")
    return choices


def _num_choices(plan: StepPlan) -> int:
    return len(plan.analyse) + len(plan.preprocess) + len(plan.encode) + len(plan.prefill)


def _analyses(choices: Iterable[ItemChoice], requests: Requests, credit: int) -> list[ItemChoice]:
    known = [choice for choice in dict.fromkeys(choices) if choice.key in requests and choice.item in requests[choice.key].unanalysed]
    return known[: max(0, credit)]


def _preprocess(view: View, requests: Requests, choices: Sequence[SegmentChoice], credit: int) -> list[SegmentChoice]:
    # Requests without KV pages take theirs first: the order of video's plans does not determine how many pages each leaves free.
    ahead_first = sorted(choices, key=lambda choice: choice.key in requests and requests[choice.key].has_kv)
    patches = _Pool(view.num_patch_pages, view.num_free_patch_pages, lambda r: r.patch_held, lambda s: s.patch_pages)
    granted = _segments(ahead_first, requests, SegmentStage.PENDING, patches)
    return [choice for choice in dict.fromkeys(choices) if choice in granted][:credit]


def _with_room(rooms: VideoRooms, requests: Requests, choices: Iterable[VideoChoice]) -> list[VideoChoice]:
    """Return the choices for which the process of video that has the medium has room. ``rooms`` has less afterwards."""
    fitting = []
    for choice in choices:
        request = requests[choice.key]
        if rooms.is_bound(request):
            if not rooms.has(request):
                continue
            rooms.take(request)
        fitting.append(choice)
    return fitting


def _encode(view: View, requests: Requests, choices: Sequence[SegmentChoice], max_rows: int) -> list[SegmentChoice]:
    pages = _Pool(view.num_embedding_pages, view.num_free_embedding_pages, lambda r: r.embedding_held, lambda s: s.embedding_pages)
    return _segments(choices, requests, SegmentStage.PREPROCESSED, pages, max_rows)


class _Pool:
    """The free pages of a pool while choices are taken from it."""

    def __init__(self, num_pages: int, num_free: int, held: Callable[[RequestView], int], need: Callable[[SegmentView], int]) -> None:
        self._num_pages, self._num_free, self._held, self._need = num_pages, num_free, held, need
        self._taken: dict[int, int] = {}

    def take(self, request: RequestView, segments: Iterable[SegmentView]) -> bool:
        """Take the pages of all of them, or none."""
        num_free, taken = self._num_free, self._taken.get(request.key, 0)
        held = self._held(request) + taken
        for need in map(self._need, segments):
            if need > num_free or not may_take(self._num_pages, num_free, held, need, request.has_kv):
                return False
            num_free, held = num_free - need, held + need
        self._taken[request.key] = taken + self._num_free - num_free
        self._num_free = num_free
        return True


def _segments(
    choices: Iterable[SegmentChoice], requests: Requests, stage: SegmentStage, pool: _Pool, max_rows: int | None = None
) -> list[SegmentChoice]:
    """Return the segments at this stage for which pages remain after those of their request's earlier segments. With
    ``max_rows`` they form one batch together with the others; a larger segment runs alone."""
    legal: list[SegmentChoice] = []
    reserved: set[SegmentChoice] = set()
    num_rows, is_closed = 0, False
    for choice in choices:
        request = requests.get(choice.key)
        if request is None or is_closed or choice in legal:
            continue
        open_ones = {SegmentChoice(request.key, s.item, s.segment): s for s in request.segments if s.stage <= stage}
        segment = open_ones.get(choice)
        if segment is None or segment.stage != stage:
            continue
        needed = [place for place in takewhile(choice.__ne__, open_ones) if place not in reserved]
        if max_rows is not None:
            if needed or legal and (request.alone or num_rows + segment.num_rows > max_rows or len(legal) >= MAX_PARTS):
                continue
        needed += [choice] if choice not in reserved else []
        if pool.take(request, [open_ones[place] for place in needed]):
            is_closed = max_rows is not None and request.alone
            reserved.update(needed)
            legal.append(choice)
            num_rows += segment.num_rows
    return legal


def _chunks(choices: Iterable[ChunkChoice], requests: Requests, max_tokens: int, grid: int) -> list[ChunkChoice]:
    legal: dict[tuple[int, int], ChunkChoice] = {}
    num_tokens = 0
    for choice in choices:
        request = requests.get(choice.key)
        if request is None or not request.has_kv or request.prefill_in_flight or (choice.key, choice.member) in legal:
            continue
        if not 0 <= choice.member < len(request.members):
            continue
        member = request.members[choice.member]
        if choice.start != member.next or not choice.start < choice.end <= member.ready:
            continue
        if choice.end % grid and choice.end != member.target:
            continue
        others = {key for key, _ in legal if key != choice.key}
        if others and (request.alone or any(requests[key].alone for key in others)):
            continue
        whole = choice._replace(end=member.chunk_end(choice.end))
        is_large = not legal and whole.end <= member.chunk_end(choice.start + max_tokens)  # a picture alone that is above the budget
        if num_tokens + whole.end - choice.start <= max_tokens or is_large:
            legal[choice.key, choice.member] = whole
            num_tokens += whole.end - choice.start
    return list(legal.values())
