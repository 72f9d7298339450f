"""Policy ``auto``: first come, first served, except where others would be late for nothing (``timely``), in plans as large as the P99
of the time between tokens allows (``feedback``). Beside decode, encode and prefill take turns (US1), or work at once where that pays
(``overlap_trial``).

The first words of a prompt wait for the picture behind them: a plan of their own costs about as much, and slows the encoder
(``batches``).

Turns: with ``unified`` a request that could have its first token at once waits while media are encoded that came after it. Here a plan
that ends the prompt of the first request goes before. Otherwise plans are as of ``unified``, and its budgets hold while nobody decodes.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from .batches import Encode, EncodeBatch, Prefill, PrefillBatch, free_turns, has_work, in_turn, partial_first
from .budgets import MIN_TOKENS
from .facts import Facts
from .feedback import Shares, left_s, noted, steer
from .overlap_trial import Trial
from .timely import timely
from .types import RequestView, StepLimits, StepPlan, View
from .unified import Unified
from .video_order import plan_video

FEW = 0.5  # of the fixed cost of a prefill plan: tokens that take less are seldom worth one


class Memory(NamedTuple):
    """The policy's memory."""

    shares: Shares = Shares()
    trial: Trial = Trial()


class Auto(Unified):
    """First come, first served, except where that makes a request late for nothing; late tokens steer the budgets."""

    name = "auto"

    def plan(self, view: View, limits: StepLimits, memory: Any) -> tuple[StepPlan, Memory]:
        """Plan one round."""
        shares, trial = known = looked(memory or Memory(), view)
        analyse, preprocess = plan_video(view)
        takes_turns = view.num_decoding > 0 and not trial.together
        if takes_turns and (trial.pair or not free_turns(view)):
            return StepPlan(analyse, preprocess), known
        if not has_work(view):
            return StepPlan(analyse, preprocess), known
        max_rows, max_tokens = budgets(shares, trial.together, view, limits)
        order, early = timely(view.requests, view.facts)
        in_video = {item.key for item in analyse} | {segment.key for segment in preprocess}
        encodes, prefills = batches(view, order, early, in_video, max_rows, max_tokens)
        encode, prefill = encodes.segments, prefills.chunks
        if takes_turns and encode and prefill and trial.is_due(view.now):
            max_rows, max_tokens = budgets(shares, True, view, limits)
            encodes, prefills = batches(view, order, early, in_video, max_rows, max_tokens)
            encode, prefill = encodes.segments, prefills.chunks
            trial = trial.begun(view.facts, encodes.num_rows, prefills.num_tokens)
        elif takes_turns:
            encode, prefill = first_in_turn(view, order, encode, prefill)
        if view.num_decoding and (encode or prefill):
            num_rows, num_tokens = encodes.num_rows if encode else 0, prefills.num_tokens if prefill else 0
            shares = shares._replace(
                encode=noted(shares.encode, view.now, num_rows, max_rows),
                prefill=noted(shares.prefill, view.now, num_tokens, max_tokens),
            )
        return StepPlan(analyse, preprocess, encode, prefill), Memory(shares, trial)


def batches(
    view: View, order: Sequence[RequestView], early: Collection[int], in_video: Collection[int], max_rows: int, max_tokens: int
) -> tuple[EncodeBatch, PrefillBatch]:
    """Return a batch of each stage, in this order; in prefill those that have passed others and begun ones go first (RS5).

    While something is encoded, or media of a request are decoded (``in_video``: from now on), more of its tokens will come. If few can
    be prefilled now, they wait for other requests' tokens. At other times they do not: they may hold the pages that others wait for.
    """
    encodes, prefills = EncodeBatch(view, max_rows).fill(order), PrefillBatch(view, max_tokens)
    if prefills.is_closed:
        return encodes, prefills
    is_encoding = bool(view.encode_in_flight or encodes.segments)
    whole: list[RequestView] = []
    few: list[RequestView] = []
    for request in partial_first(order, early):
        comes = is_encoding or request.video_in_flight or request.key in in_video
        (few if comes and has_few(request, view.facts) else whole).append(request)
    prefills.fill(whole)
    if prefills.chunks:
        prefills.fill(few)
    return encodes, prefills


def has_few(request: RequestView, facts: Facts) -> bool:
    """Return whether a plan for the ready tokens alone would cost twice the time by which it shortens a later one."""
    num_ready = request.tokens_ready
    return num_ready < request.tokens_left and num_ready * facts.prefill.unit_s < FEW * facts.prefill.base_s


def looked(memory: Memory, view: View) -> Memory:
    """Return the memory after a look at the times between tokens. After a change of turns only later ones count."""
    is_of_now = memory.shares.changed_s <= view.now - view.facts.tbt_window_s
    trial = memory.trial.look(view, view.facts.late_share or 0.0 if is_of_now else 0.0)
    if trial.together != memory.trial.together:
        return Memory(memory.shares._replace(changed_s=view.now), trial)
    shares = steer(memory.shares, view.facts)
    return memory if shares is memory.shares and trial is memory.trial else Memory(shares, trial)


def budgets(shares: Shares, together: bool, view: View, limits: StepLimits) -> tuple[int, int]:
    """Return the rows of an encode plan and the tokens of a prefill plan. Two ``together`` have half of the time each."""
    if not view.num_decoding:
        return limits.encode_rows, limits.prefill_tokens
    facts, each_s = view.facts, left_s(view.facts) / (2 if together else 1)
    rows = facts.encode.units(shares.encode.share * each_s, min(1, limits.max_encode_rows), limits.max_encode_rows)
    least_tokens = min(MIN_TOKENS, limits.max_prefill_tokens)
    return rows, facts.prefill.units(shares.prefill.share * each_s, least_tokens, limits.max_prefill_tokens)


def first_in_turn(view: View, order: Sequence[RequestView], encode: Encode, prefill: Prefill) -> tuple[Encode, Prefill]:
    """Keep what has its turn: a prefill plan that ends the prompt of the first request; otherwise see ``in_turn``."""
    if encode and prefill and free_turns(view) == 1:
        planned = {choice.key for choice in encode} | {chunk.key for chunk in prefill}
        first = next(request for request in order if request.key in planned)
        if any([chunk.key == first.key and chunk.end == first.members[chunk.member].target for chunk in prefill]):
            return (), prefill
    return in_turn(view, encode, prefill)
