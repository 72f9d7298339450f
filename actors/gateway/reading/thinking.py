"""The fields by which clients turn thoughts on and off, as a value for the model's chat template, and say where they want them. Pure.

A template has a variable for it, or none: then the model thinks or not, and the fields have no effect.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

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


ThoughtPlace = Literal["apart", "inside", "left out"]
"""Of thoughts in an answer: in a field of their own, in its text as the model wrote them, or nowhere."""

_PLACES: Mapping[str, Mapping[Any, ThoughtPlace]] = {  # by the names of vLLM, OpenRouter, SGLang and llama.cpp
    "include_reasoning": {True: "apart", False: "left out"},
    "separate_reasoning": {True: "apart", False: "inside"},
    "reasoning_split": {True: "apart", False: "inside"},
    "reasoning_format": {
        "auto": "apart", "deepseek": "apart", "parsed": "apart", "none": "inside", "raw": "inside", "hidden": "left out"
    },
}  # fmt: skip
PLACE_FIELDS = tuple(_PLACES)


class Thinking(NamedTuple):
    """A request's field ``path`` turns thoughts on or off. ``effort``: how hard the model is to think, "" if it does not say."""

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
    found: Thinking | None = None
    for name in names:
        if (value := fields.take(name, _SCHEMA)) is None:
            continue
        path = fields.path(name)
        is_on, effort = _of_object(path, value) if isinstance(value, dict) else _of_word(path, value)
        if is_on is None:
            continue
        if found is None:
            found = Thinking(path, is_on, effort)
        elif found.is_on and is_on and effort and not found.effort:
            found = found._replace(effort=effort)
        elif found[1:] != (is_on, effort):
            note(path, f"{found.path} counts")
    return found


def read_thought_place(fields: Fields) -> ThoughtPlace:
    """Take the fields ``PLACE_FIELDS``; the first that says something counts. Raises: RequestError for values that nobody knows, with
    strict fields."""
    found: ThoughtPlace | None = None
    for name, places in _PLACES.items():
        value = fields.take(name, {"enum": list(places)})
        if value is None:
            continue
        if isinstance(value, bool | str) and value in places:
            found = found or places[value]
        else:
            tolerate(fields.path(name), f"is {show(value)}, supported are {', '.join(map(show, places))}")
    return found or "apart"


def _of_word(path: str, value: Any) -> tuple[bool | None, str]:
    """Return whether the model thinks, None if nobody knows, and how hard."""
    if isinstance(value, bool):
        return value, ""
    if isinstance(value, str) and value in EFFORTS:
        return value != "none", value.removeprefix("none")
    tolerate(path, f"is {show(value)}, supported are true, false, {', '.join(EFFORTS)}")
    return None, ""


def _of_object(path: str, value: dict[str, Any]) -> tuple[bool | None, str]:
    is_on, effort = None, ""
    for name, one in value.items():
        part = f"{path}.{name[:64]}"
        if name in ("enabled", "effort") and one is not None:
            said, effort = _of_word(part, one)
            is_on = said if is_on is None else is_on
        elif name == "type" and isinstance(one, str) and one in _OF_TYPES:
            is_on = _OF_TYPES[one]
        elif one is not None:
            note(part, "it does not say whether the model thinks")
    return is_on, effort
