"""Feedback of ``auto``: shares of the time that steps leave, by which encode and prefill hold the P99 of the time between tokens at its
objective where they can (pure; US8's tau and alpha, TI3's search).

A time between tokens is a step alone, of ``step_s``, and what a plan beside it adds, which grows with the plan's duration. A
plan may take ``share`` of what the objective leaves: AIM x objective - step_s. With a share of 1 even a plan that holds decode up for
all of its duration keeps the objective. What is measured over the objective moves the share to where the added part fits, at most by
``CUT`` at once; where P99 is below ``ROOM`` of the objective, it grows by ``RAISE``. Encode and prefill have shares of their own; only
those change that had plans in the window, and only those grow that used their budgets: an idle stage does not wind up. After a change
the next one waits until the window of measurements has no older ones.

Cuts must help. Where stages compete for cores or memory, any plan beside a step lengthens it, large or small, and smaller plans only
delay media. Cuts that take a part of ``DEEP`` or more off a share should take as large a part off what plans add to P99. If they take
less than ``HELPS`` of that, they are undone, shares below 1 return to 1, and the next cut waits ``FIRST_HOLD_S``, then twice as long,
up to ``MAX_HOLD_S``, unless P99 has fallen by ``EASED``. If P99 is ``GREW`` times that before the cuts, the load has grown, and only
later cuts are judged. Shares that stay as they are for ``MAX_HOLD_S`` while tokens are late, at their least or for want of plans,
return to 1 and are judged anew.
"""

import math
from typing import NamedTuple

from .facts import Facts

AIM = 0.9  # of the objective, for P99
ROOM = 0.8
CUT, RAISE = 0.3, 1.25
LEAST_SHARE, MOST_SHARE = 0.25, 4.0
MIN_LEFT = 0.2  # of the objective, for plans, even where a step alone takes nearly all of it
USED = 0.5  # a plan of this part of its budget, or more, has used it
DEEP, HELPS, GREW, EASED = 0.25, 0.4, 1.1, 1.5
FIRST_HOLD_S, MAX_HOLD_S = 5.0, 60.0


class StageShare(NamedTuple):
    """The share of a stage; when it last had a plan beside decode, and one that used its budget."""

    share: float = 1.0
    ran_s: float = -math.inf
    used_s: float = -math.inf


class Before(NamedTuple):
    """The shares of encode and prefill, and P99, before the first of some cuts."""

    encode: float
    prefill: float
    p99_s: float


class Shares(NamedTuple):
    """The memory of the feedback. ``changed_s``: when a share or the turns last changed. ``before``: the cuts that have no verdict yet.
    No cut before ``cut_s``, while P99 is about ``vain_s``, as when the last ones were undone; ``hold_s``: the wait."""

    encode: StageShare = StageShare()
    prefill: StageShare = StageShare()
    changed_s: float = 0.0
    before: Before | None = None
    cut_s: float = -math.inf
    hold_s: float = FIRST_HOLD_S
    vain_s: float = 0.0


def steer(memory: Shares, facts: Facts) -> Shares:
    """Return the memory after a look at the last window: see the module. The same window is looked at once."""
    began_s = facts.now - facts.tbt_window_s
    if facts.tbt_p99_s is None or memory.changed_s > began_s:
        return memory
    before = memory.before
    if before is not None and (facts.tbt_p99_s <= facts.tbt_s or facts.tbt_p99_s > GREW * before.p99_s):
        before = None
    if before is not None and max(memory.encode.ran_s, memory.prefill.ran_s) > began_s and _in_vain(memory, before, facts):
        return _undone(memory, before, facts.now)
    is_held = facts.now < memory.cut_s and facts.tbt_p99_s * EASED > memory.vain_s
    factor = max(1.0, _factor(facts)) if is_held else _factor(facts)
    encode, prefill = _moved(memory.encode, factor, began_s), _moved(memory.prefill, factor, began_s)
    if encode == memory.encode and prefill == memory.prefill:
        if factor < 1 and facts.now - memory.changed_s > MAX_HOLD_S:
            return _restored(memory, before or Before(1.0, 1.0, 0.0), facts.now)
        return memory if before is memory.before else memory._replace(before=before)
    if factor < 1 and before is None:
        before = Before(memory.encode.share, memory.prefill.share, facts.tbt_p99_s)
    return memory._replace(encode=encode, prefill=prefill, changed_s=facts.now, before=before)


def _in_vain(memory: Shares, before: Before, facts: Facts) -> bool:
    """Return whether these cuts were deep enough for a verdict, and P99 has hardly fallen."""
    assert facts.tbt_p99_s is not None
    depth = 1 - min(memory.encode.share / before.encode, memory.prefill.share / before.prefill)
    return depth >= DEEP and before.p99_s - facts.tbt_p99_s < HELPS * depth * (before.p99_s - (facts.step_s or 0.0))


def _undone(memory: Shares, before: Before, now: float) -> Shares:
    """Return the memory without these cuts, and with a hold on the next one."""
    hold_s = min(MAX_HOLD_S, 2 * memory.hold_s) if now - memory.cut_s < MAX_HOLD_S else FIRST_HOLD_S
    return _restored(memory, before, now)._replace(cut_s=now + hold_s, hold_s=hold_s, vain_s=before.p99_s)


def _restored(memory: Shares, before: Before, now: float) -> Shares:
    """Return the memory with these shares, or 1 in place of smaller ones."""
    encode = memory.encode._replace(share=max(1.0, before.encode))
    prefill = memory.prefill._replace(share=max(1.0, before.prefill))
    return memory._replace(encode=encode, prefill=prefill, changed_s=now, before=None)


def left_s(facts: Facts) -> float:
    """Return what the objective leaves for plans."""
    return max(MIN_LEFT * facts.tbt_s, AIM * facts.tbt_s - (facts.step_s or 0.0))


def _factor(facts: Facts) -> float:
    """Return by how much what plans add should change: 1 within ``ROOM`` to 1 of the objective."""
    assert facts.tbt_p99_s is not None
    if facts.tbt_p99_s <= ROOM * facts.tbt_s:
        return RAISE
    if facts.tbt_p99_s <= facts.tbt_s:
        return 1.0
    added_s = max(facts.tbt_p99_s - (facts.step_s or 0.0), left_s(facts))
    return max(CUT, min(AIM, left_s(facts) / added_s))


def _moved(stage: StageShare, factor: float, began_s: float) -> StageShare:
    """Return the stage with another share, if it had plans since then, and to grow, such as used their budget."""
    if (stage.used_s if factor > 1 else stage.ran_s) < began_s:
        return stage
    share = min(MOST_SHARE, max(LEAST_SHARE, stage.share * factor))
    return stage if share == stage.share else stage._replace(share=share)


def noted(stage: StageShare, now: float, num_units: int, budget: int) -> StageShare:
    """Return the stage after a plan of so many units; as it was without any."""
    if not num_units:
        return stage
    return StageShare(stage.share, now, now if num_units >= USED * budget else stage.used_s)
