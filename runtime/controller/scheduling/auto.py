"""Policy ``auto``: the order of ``slack`` (MS2, MS3), with budgets that hold the P99 of the time between tokens at its objective
(feedback on US8's tau and alpha, TI3's search), and encode beside prefill while that makes no token late (US1, TI5, RS6).

Feedback: a time between tokens is a step alone, of ``step_s``, and what a plan beside it adds, which grows with the plan's duration. A
plan may take ``share`` of what the objective leaves: AIM x objective - step_s. With a share of 1 even a plan that holds decode up for
all of its duration keeps the objective. What is measured over the objective moves the share to where the added part fits, at most by
``CUT`` at once; where P99 is below ``ROOM`` of the objective, it grows by ``RAISE``. Encode and prefill have shares of their own; only
those change that had plans in the window, and only those grow that used their budgets: an idle stage does not wind up. After a change
the next one waits until the window of measurements has no older ones.

Encode and prefill take turns beside decode (US1). Where both have had work for ``TRIAL_S``, both at once is tried while at most
``RARE`` of the tokens are late, with half of the time for each. It is taken back at the first window with more than ``LATE``, or
after ``TRIAL_S`` if less than ``PAYS`` times the work was sent in a second. The next try waits twice as long, up to
``MAX_BACKOFF_S``; one that lasts ``PROVEN_S`` resets the wait. gLLM paid 3.4 times the TPOT for overlap without a guard.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

from .budgets import MIN_TOKENS
from .facts import Cost, Facts
from .slack import Slack
from .types import StepLimits, StepPlan, View

AIM = 0.9  # of the objective, for P99
ROOM = 0.8
CUT, RAISE = 0.3, 1.25
LEAST_SHARE, MOST_SHARE = 0.25, 4.0
MIN_LEFT = 0.2  # of the objective, for plans, even where a step alone takes nearly all of it
USED = 0.5  # a plan of this part of its budget, or more, has used it
LATE, RARE = 0.01, 0.002  # shares of tokens
FIRST_BACKOFF_S, MAX_BACKOFF_S, PROVEN_S = 5.0, 300.0, 60.0
TRIAL_S, PAYS = 10.0, 1.1
MAX_IDLE_S = 3.0  # of a stage that has work


class StageShare(NamedTuple):
    """The share of a stage; when it last had a plan beside decode, and one that used its budget."""

    share: float = 1.0
    ran_s: float = -math.inf
    used_s: float = -math.inf


class Work(NamedTuple):
    """Plans sent beside decode since ``since_s``: how many of each stage, and their units."""

    since_s: float = -math.inf
    num_encodes: int = 0
    num_rows: int = 0
    num_prefills: int = 0
    num_tokens: int = 0

    def seconds(self, facts: Facts) -> float:
        """Return the seconds that these plans take, by what plans cost now."""
        encode_s = facts.encode.base_s * self.num_encodes + facts.encode.unit_s * self.num_rows
        return encode_s + facts.prefill.base_s * self.num_prefills + facts.prefill.unit_s * self.num_tokens


class Memory(NamedTuple):
    """The policy's memory. ``changed_s``: when a share or ``together`` last changed. ``together``: encode and prefill may run at once,
    since ``tried_s``, or again from ``retry_s`` on. ``work``: since that changed, or, in turns, since both stages have had work, for
    twice ``TRIAL_S`` at most; ``turns``: the same of the time before the try, up to its beginning."""

    encode: StageShare = StageShare()
    prefill: StageShare = StageShare()
    changed_s: float = 0.0
    together: bool = False
    tried_s: float = 0.0
    retry_s: float = 0.0
    backoff_s: float = FIRST_BACKOFF_S
    work: Work = Work()
    turns: Work = Work()


class Auto(Slack):
    """Slack's order and shares of a batch, within budgets that are fed back."""

    name = "auto"

    def plan(self, view: View, limits: StepLimits, memory: Any) -> tuple[StepPlan, Memory]:
        """Plan one round."""
        memory = steer(memory or Memory(), view.facts)
        if not view.num_decoding:
            return super().plan(view, limits, None)[0], memory
        facts = view.facts
        each_s = left_s(facts) / 2 if memory.together else left_s(facts)
        own = replace(
            limits,
            prefill_tokens=_units(memory.prefill.share * each_s, facts.prefill, MIN_TOKENS, limits.max_prefill_tokens),
            encode_rows=_units(memory.encode.share * each_s, facts.encode, 1, limits.max_encode_rows),
            exclusive=limits.exclusive and not memory.together,
        )
        step, _ = super().plan(view, own, None)
        return step, _note(memory, view, step, own) if step.prefill or step.encode else memory


def _note(memory: Memory, view: View, step: StepPlan, own: StepLimits) -> Memory:
    """Return the memory after a plan beside decode."""
    since_s, num_encodes, num_rows, num_prefills, num_tokens = memory.work
    idle_s = view.now - min(memory.encode.ran_s, memory.prefill.ran_s)
    if not memory.together and (idle_s > MAX_IDLE_S or view.now - since_s > 2 * TRIAL_S):
        since_s, num_encodes, num_rows, num_prefills, num_tokens = Work(view.now)
    encode, prefill = memory.encode, memory.prefill
    if step.prefill:
        size = sum([chunk.end - chunk.start for chunk in step.prefill])
        num_prefills, num_tokens = num_prefills + 1, num_tokens + size
        prefill = _noted(prefill, view.now, size, own.prefill_tokens)
    if step.encode:
        size = _num_rows(view, step)
        num_encodes, num_rows = num_encodes + 1, num_rows + size
        encode = _noted(encode, view.now, size, own.encode_rows)
    return memory._replace(encode=encode, prefill=prefill, work=Work(since_s, num_encodes, num_rows, num_prefills, num_tokens))


def steer(memory: Memory, facts: Facts) -> Memory:
    """Return the memory after a look at the last window: see the module. The same window is looked at once."""
    if facts.late_share is None or facts.tbt_p99_s is None:
        return memory
    if memory.together and (facts.late_share > LATE or not _pays(memory, facts)):
        backoff_s = memory.backoff_s if facts.now - memory.tried_s < PROVEN_S else FIRST_BACKOFF_S
        return memory._replace(
            together=False,
            retry_s=facts.now + backoff_s,
            backoff_s=min(MAX_BACKOFF_S, 2 * backoff_s),
            changed_s=facts.now,
            work=Work(facts.now),
        )
    began_s = facts.now - facts.tbt_window_s
    if memory.changed_s > began_s:
        return memory
    both_ran = min(memory.encode.ran_s, memory.prefill.ran_s) > began_s and facts.now - memory.work.since_s >= TRIAL_S
    if both_ran and not memory.together and facts.late_share <= RARE and facts.now >= memory.retry_s:
        return memory._replace(together=True, tried_s=facts.now, changed_s=facts.now, work=Work(facts.now), turns=memory.work)
    factor = _factor(facts)
    encode, prefill = _moved(memory.encode, factor, began_s), _moved(memory.prefill, factor, began_s)
    if (encode, prefill) == (memory.encode, memory.prefill):
        return memory
    return memory._replace(encode=encode, prefill=prefill, changed_s=facts.now)


def _pays(memory: Memory, facts: Facts) -> bool:
    """Return whether more work is sent in a second than before the try. Judged once ``TRIAL_S`` are over, and not for ever: load
    changes."""
    tried_s, before_s = facts.now - memory.tried_s, memory.tried_s - memory.turns.since_s
    if not TRIAL_S <= tried_s <= 2 * TRIAL_S:
        return True
    return memory.work.seconds(facts) / tried_s >= PAYS * memory.turns.seconds(facts) / before_s


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
    return stage._replace(share=min(MOST_SHARE, max(LEAST_SHARE, stage.share * factor)))


def _units(seconds: float, cost: Cost, low: int, high: int) -> int:
    """Return the budget for this time."""
    return cost.units(seconds, min(low, high), high)


def _noted(stage: StageShare, now: float, num_units: int, budget: int) -> StageShare:
    return StageShare(stage.share, now, now if num_units >= USED * budget else stage.used_s)


def _num_rows(view: View, step: StepPlan) -> int:
    chosen = set(step.encode)
    return sum([s.num_rows for request in view.requests for s in request.segments if (request.key, s.item, s.segment) in chosen])
