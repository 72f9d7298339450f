"""Verdict on a request's outcome: the reference gives the right answer, the faults around it give the excuses.

Pure. The standard is the promise: whatever dies, a request ends as if undisturbed. A prefix of the
reference, in text and in ids, is what a cancelled or excused one may have got: nothing is ever lost in between, doubled or changed.
Where rounding depends on the batch, only numbers of ids and ends are judged.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from mmrt.bench.processes import SUPERVISOR
from mmrt.runtime.stage_table import stage_of

from .faults import Fault

# complete: finish reason and [DONE]. error: an error event and [DONE]. refused: an HTTP error instead of a stream.
# cancelled: we went away. broken: the connection broke. silent: an end without [DONE]. overdue: no end in time.
End = Literal["complete", "error", "refused", "cancelled", "broken", "silent", "overdue", "garbled"]
_GATEWAY_ENDS = frozenset({"term", "oom"})
_LOOKS_LIKE_GUILT = frozenset({"stop", "exit", "oom"})


class Reference(msgspec.Struct, frozen=True):
    """The answer of an undisturbed run."""

    text: str
    ids: list[int]
    finish: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client saw it. Times: CLOCK_MONOTONIC seconds; ``status``: of HTTP, or in the error event."""

    request: str
    end: End
    began_s: float
    ended_s: float
    text: str = ""
    ids: list[int] = []
    finish: str = ""
    status: int = 0
    usage_tokens: int | None = None
    detail: str = ""
    id: str = ""


class Trouble(msgspec.Struct, frozen=True):
    """A fault and the time in which it may be felt."""

    fault: Fault
    began_s: float
    ended_s: float


def judge(outcome: Outcome, reference: Reference, troubles: Sequence[Trouble], is_exact: bool = True) -> str:
    """The fault of the outcome, "" if there is none. Without ``is_exact`` text and ids may differ from the reference's."""
    if is_exact and not reference.text.startswith(outcome.text):
        at = _first_difference(outcome.text, reference.text)
        return f"its text differs from the reference at character {at}: {outcome.text[at : at + 30]!r}"
    if is_exact and outcome.ids != reference.ids[: len(outcome.ids)]:
        at = _first_difference(outcome.ids, reference.ids)
        return f"its ids differ from the reference at token {at}: {outcome.ids[at : at + 5]}"
    if len(outcome.ids) > len(reference.ids):
        return f"it has {len(outcome.ids)} ids, at most {len(reference.ids)} were asked for"
    if outcome.end == "complete":
        return _judge_whole(outcome, reference, is_exact)
    if outcome.end == "cancelled":
        return ""
    around = [trouble for trouble in troubles if trouble.began_s <= outcome.ended_s and trouble.ended_s >= outcome.began_s]
    if outcome.end in ("error", "refused", "broken") and is_excused(outcome, around):
        return ""
    return (
        f"it ended {outcome.end} ({outcome.status or ''} {outcome.detail[:200]}) after {len(outcome.ids)} of {len(reference.ids)} ids"
    )


def _judge_whole(outcome: Outcome, reference: Reference, is_exact: bool) -> str:
    if outcome.finish != reference.finish:
        return f"its finish reason is {outcome.finish!r}, not {reference.finish!r}"
    if len(outcome.ids) != len(reference.ids) or (is_exact and outcome.text != reference.text):
        return (
            f"it lacks an end: {len(outcome.ids)} of {len(reference.ids)} ids, {len(outcome.text)} of {len(reference.text)} characters"
        )
    if outcome.usage_tokens != len(reference.ids):
        return f"its usage says {outcome.usage_tokens} tokens, it has {len(reference.ids)}"
    return ""


def is_excused(outcome: Outcome, around: Sequence[Trouble]) -> bool:
    """True if one of the faults around an unfinished request excuses its end."""
    if 400 <= outcome.status < 500:
        return False  # it would be the client's fault, and the same request has been answered before
    guilty = 0
    for trouble in around:
        cell = trouble.fault.cell
        if cell.target == SUPERVISOR:
            return True  # the run ends with it
        if stage_of(cell.target) == "gateway" and cell.kind in _GATEWAY_ENDS:
            return True  # when it is told to end it refuses while it drains, and closes its connections
        if cell.phase == "drain":
            if outcome.status == 503 or (outcome.began_s >= trouble.began_s and not outcome.id):
                return True  # refused, or it met the end of a connection, as above
        elif cell.kind == "oom" and outcome.end != "broken" and outcome.status >= 500:
            return True  # a step that has no memory fails its request
        elif cell.kind == "enospc" and outcome.status == 503:
            return True
        guilty += cell.kind in _LOOKS_LIKE_GUILT
    # Twice in a row an actor died in a way that the request itself could have caused: quarantine cannot tell.
    return guilty >= 2 and outcome.status == 500


def _first_difference(found: Sequence[object], wanted: Sequence[object]) -> int:
    pairs = zip(found, wanted, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(found), len(wanted)))
