"""Decode's words for its rows, read on a timer: committed ids and ends, rates, times between tokens (pure; rules over
``ControllerState``)."""

from collections.abc import Sequence
from typing import NamedTuple

from ....schema.rows import Phase
from ..caches.prefix_cache import learn_ids, name_pages
from ..scheduling.budgets import steer_share
from ..state.inflight_plan import LONG_AGO_S
from ..state.state import ControllerState
from .lifecycle import settle

WINDOW_S = 0.25
NAMED_AT_ONCE = 4  # pages
_FORGET = 0.2  # weight of the newest window in the time of an undisturbed step


Progress = tuple[int, int, int, int]
"""decode's words for a row, read from the sequence table: (row, row_generation, committed, end_code). A tick reads many."""


class IdSpan(NamedTuple):
    """Committed ids [first, last) of a row."""

    row: int
    row_generation: int
    first: int
    last: int


NewIds = Sequence[tuple[IdSpan, Sequence[int]]]


def wanted_ids(state: ControllerState, progress: Sequence[Progress], *, all_of_them: bool = False) -> list[IdSpan]:
    """Return the ids to read, given the rows' words. They name pages: a row's are wanted some pages at a time, and to the end once it
    has ended or decode has dropped it."""
    if not state.limits.prefix_cache:
        return []
    spans, enough, rows = [], NAMED_AT_ONCE * state.limits.kv_page_tokens, state.rows
    for row, generation, committed, end_code in progress:
        if (request := rows[row]) is None:
            continue
        num_new = committed - len(request.answer.ids)
        if num_new < enough and (num_new <= 0 or not (end_code or all_of_them or not request.answer.counts_known)):
            continue
        if request.row_generation == generation:
            spans.append(IdSpan(row, generation, committed - num_new, committed))
    return spans


def note_last_words(state: ControllerState, progress: Sequence[Progress], new_ids: NewIds) -> None:
    """Name what decode has filled of rows that are about to end. One that is preempted has more to prefill again."""
    for (row, generation, committed, _), (_, ids) in zip(progress, new_ids, strict=False):
        request = state.rows[row]
        if request is not None and request.row_generation == generation:
            request.answer.commit(committed)
            learn_ids(request, ids)
            name_pages(state, request)
            state.touch(request)


def observe(state: ControllerState, progress: Sequence[Progress], new_ids: NewIds, now: float) -> None:
    """Record committed ids and ends; measure rates and the time between tokens."""
    if any([inflight.disturbs_decode for inflight in state.plans.values()]):
        state.steering.disturbed_s = now
    watched = state.watched()
    _record(state, progress, new_ids)
    if now - state.windows_s >= WINDOW_S:
        _measure(state, watched, now)


def _record(state: ControllerState, progress: Sequence[Progress], new_ids: NewIds) -> None:
    ids_of = {span.row: ids for span, ids in new_ids}
    rows = state.rows
    for row, generation, committed, end_code in progress:
        request = rows[row]
        if request is None or request.row_generation != generation or request.ending:
            continue
        answer = request.answer
        if not answer.counts_known and request.record.member_of is None:
            state.note_counts(request, True)
        answer.commit(committed)
        if ids_of and (ids := ids_of.get(row)) is not None:
            learn_ids(request, ids)
            name_pages(state, request)
        if end_code and not answer.end_code:
            state.note_end(request, end_code)
            settle(state, request)


def _measure(state: ControllerState, watched: Sequence[tuple[int, int]], now: float) -> None:
    """Measure the rates of rows whose windows end, and begin windows."""
    num_tokens, span_s = 0, 0.0
    quiet_tokens, quiet_s = 0, 0.0
    rows, decode, disturbed_s = state.rows, Phase.DECODE, state.steering.disturbed_s
    oldest_s = now
    for row, generation in watched:
        request = rows[row]
        if request is None or request.row_generation != generation or request.ending:
            continue
        if (window := request.answer.window) is None or request.phase != decode:
            request.answer.begin_window(now)
            if request.phase != decode:
                oldest_s = LONG_AGO_S
            continue
        began_s, _ = window
        if now - began_s < WINDOW_S:
            if began_s < oldest_s:
                oldest_s = began_s
            continue
        num_ids = request.answer.end_window(now)
        state.touch(request)
        num_tokens += num_ids
        span_s += now - began_s
        if began_s > disturbed_s:
            quiet_tokens += num_ids
            quiet_s += now - began_s
    state.windows_s = oldest_s
    if num_tokens and now - state.steering.steered_s >= WINDOW_S:  # once per window, even if rows' windows are staggered
        state.steering.steered_s = now
        if quiet_tokens:
            _learn_undisturbed(state, quiet_s / quiet_tokens)
        _steer(state, span_s / num_tokens)


def expose_finished_rows(state: ControllerState) -> None:
    """Put rows that ended during their preemption into phase DECODE, where readers look for ends."""
    for request in state.preparing():
        if request.answer.end_code and not request.record.evicting:
            state.set_phase(request, Phase.DECODE)


def _learn_undisturbed(state: ControllerState, tbt_s: float) -> None:
    known_s = state.steering.undisturbed_s
    state.steering.undisturbed_s = tbt_s = tbt_s if known_s is None else known_s + _FORGET * (tbt_s - known_s)
    state.costs.note_step(tbt_s)


def _steer(state: ControllerState, tbt_s: float) -> None:
    state.steering.tbt_s = tbt_s
    state.steering.share = steer_share(state.steering.share, tbt_s, state.tbt_target_s)
