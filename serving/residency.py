"""Which models have a run (pure): when one is started, which gives way to it, and which has been idle for too long.

A model is absent, loading, ready, or draining, and then absent again. Its run takes memory from its start until it is gone. Models that
are asked for get theirs in the order in which somebody began to wait. For the first of them, idle models give way, the one used longest
ago first; if that is not enough, busy ones do after a turn: they take no new requests, finish those they have, and end.
"""

import math
from collections.abc import Sequence
from enum import StrEnum

import msgspec

LULL_S = 1.0  # since its last request a model is no idle one yet: a client that waits for one answer soon asks for the next


class State(StrEnum):
    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class Residence(msgspec.Struct, kw_only=True):
    """What decisions about a model depend on. Times are of one clock, in seconds. ``needs_bytes``: None until its card is known.
    ``waiting_since_s``: since when a request waits for it, or it should be there; None if nobody wants it. ``retry_s``: not to be
    started before. ``num_unattended``: requests that go on without clients. ``keep_s``: idle time that its last request asked for;
    None: the configuration's."""

    name: str
    pinned: bool = False
    needs_bytes: int | None = None
    state: State = State.ABSENT
    num_running: int = 0
    num_unattended: int = 0
    waiting_since_s: float | None = None
    ready_since_s: float = 0.0
    last_used_s: float = 0.0
    retry_s: float = -math.inf
    keep_s: float | None = None

    @property
    def is_held(self) -> bool:
        """Whether it takes memory."""
        return self.state is not State.ABSENT

    @property
    def can_give_way(self) -> bool:
        return self.state is State.READY and not self.pinned

    @property
    def is_busy(self) -> bool:
        return self.num_running > 0 or self.num_unattended > 0 or self.waiting_since_s is not None


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """``budget_bytes``: of all runs. The others: see ``[front]`` of the file."""

    budget_bytes: int
    idle_s: float
    turn_s: float


class Decision(msgspec.Struct, frozen=True):
    """Names of models to start, and to let drain."""

    start: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()


def decide(models: Sequence[Residence], rules: Rules, now_s: float) -> Decision:
    """Return what is to be done now."""
    drain = [model for model in models if _is_idle_for_long(model, rules, now_s)]
    start: list[Residence] = []
    held = sum(model.needs_bytes or 0 for model in models if model.is_held)
    wanted = [model for model in models if _is_wanted(model, now_s) and fits(model, models, rules.budget_bytes)]
    for model in sorted(wanted, key=lambda model: model.waiting_since_s or 0.0):
        needs = model.needs_bytes or 0
        if held + needs <= rules.budget_bytes:
            start.append(model)
            held += needs
            continue
        leaving = sum(other.needs_bytes or 0 for other in models if other.state is State.DRAINING or other in drain)
        drain += _giving_way(model, held + needs - leaving - rules.budget_bytes, models, drain, rules, now_s)
        break  # what becomes free is for this one
    return Decision(tuple(model.name for model in start), tuple(model.name for model in drain))


def fits(model: Residence, models: Sequence[Residence], budget_bytes: int) -> bool:
    """Return whether the model could be loaded beside the pinned ones, or is one of them."""
    pinned = _pinned(models, budget_bytes)
    if model.pinned:
        return any(model is other for other in pinned)
    return (model.needs_bytes or 0) + sum(other.needs_bytes or 0 for other in pinned) <= budget_bytes


def _pinned(models: Sequence[Residence], budget_bytes: int) -> list[Residence]:
    """Return the pinned models that are loaded, and those others, in their order, for which there is room beside them."""
    found = [model for model in models if model.pinned and model.is_held]
    for model in models:
        if model.pinned and not model.is_held and sum(one.needs_bytes or 0 for one in (*found, model)) <= budget_bytes:
            found.append(model)
    return found


def _is_wanted(model: Residence, now_s: float) -> bool:
    is_asked_for = model.state is State.ABSENT and model.waiting_since_s is not None
    return is_asked_for and model.needs_bytes is not None and now_s >= model.retry_s


def _is_idle_for_long(model: Residence, rules: Rules, now_s: float) -> bool:
    if not model.can_give_way or model.is_busy:
        return False
    idle_s = (rules.idle_s or math.inf) if model.keep_s is None else model.keep_s
    return now_s >= model.last_used_s + idle_s


def _giving_way(
    wanted: Residence, missing: int, models: Sequence[Residence], leaving: Sequence[Residence], rules: Rules, now_s: float
) -> list[Residence]:
    """Return which models give way to the wanted one, which lacks this many bytes; none if that would not be enough."""
    able = [model for model in models if model.can_give_way and model not in leaving]
    idle = [model for model in able if not model.is_busy and now_s >= model.last_used_s + LULL_S]
    busy = [model for model in able if model not in idle]
    busy = [model for model in busy if now_s >= max(wanted.waiting_since_s or 0.0, model.ready_since_s) + rules.turn_s]
    found: list[Residence] = []
    for model in (*sorted(idle, key=lambda model: model.last_used_s), *sorted(busy, key=lambda model: model.ready_since_s)):
        if missing <= 0:
            break
        found.append(model)
        missing -= model.needs_bytes or 0
    return found if missing <= 0 else []
