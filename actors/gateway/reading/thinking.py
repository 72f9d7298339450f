"""The fields by which clients turn thoughts on and off, as a value for the model's chat template. Pure.

A template has a variable for it, or none: then thoughts are part of the text, and the fields have no effect.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from .fields import Fields, Schema, show
from .ignored import note, tolerate

SWITCHES = ("enable_thinking", "thinking")  # variables of templates
FIELDS = (*SWITCHES, "reasoning_effort", "reasoning")  # of requests; the first that says something counts
OF_OLLAMA = ("think",)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_EFFORT = "reasoning_effort"  # the variable of templates that tell efforts apart
_OF_TYPES = {"enabled": True, "disabled": False}  # "adaptive" leaves it to the model
_SCHEMA: Schema = {"anyOf": [{"type": ["boolean", "object"]}, {"enum": list(EFFORTS)}]}
NO_SWITCH = "the model's chat template has no variable for it"


class Thinking(NamedTuple):
    """What a request says in its field ``path``: whether the model thinks before it answers, and how hard ("" if it does not say)."""

    path: str
    is_on: bool
    effort: str = ""

    def among(self, options: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
        """Return the variables that say so to a template that has the variables ``known``. ``options``, which the request names itself,
        come first."""
        said: dict[str, Any] = dict.fromkeys((name for name in SWITCHES if name in known), self.is_on)
        if self.effort and _EFFORT in known:
            said[_EFFORT] = self.effort
        if not said:
            note(self.path, NO_SWITCH)
        return {**said, **options}


def read_thinking(fields: Fields, names: tuple[str, ...] = FIELDS) -> Thinking | None:
    """Take the fields ``names``. Returns None where none says whether the model thinks. Raises: RequestError for values that nobody
    knows, with strict fields."""
    found = None
    for name in names:
        if (value := fields.take(name, _SCHEMA)) is None:
            continue
        said = _said(value)
        if said is None and not isinstance(value, dict):
            tolerate(fields.path(name), f"is {show(value)}, supported are true, false, {', '.join(EFFORTS)}")
        elif said is None:
            note(fields.path(name), "it does not say whether the model thinks")
        elif found is None:
            found = Thinking(fields.path(name), *said)
    return found


def _said(value: Any) -> tuple[bool, str] | None:
    if isinstance(value, bool):
        return value, ""
    if isinstance(value, str):
        return (value != "none", value.removeprefix("none")) if value in EFFORTS else None
    if not isinstance(value, dict):
        return None
    if isinstance(kind := value.get("type"), str) and kind in _OF_TYPES:
        return _OF_TYPES[kind], ""
    if isinstance(value.get("enabled"), bool):
        return value["enabled"], ""
    return _said(effort) if isinstance(effort := value.get("effort"), str) else None
