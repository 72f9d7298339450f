"""Fields of a chat request for how the template ends the prompt, and for the template's own options. Pure; used by ``validation``."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from .fields import Fields, Schema, refuse, show
from .ignored import note, tolerate
from .thinking import NO_SWITCH, SWITCHES, Thinking, read_thinking

MAX_OPTIONS = 16
OPTIONS = "chat_template_kwargs"
_MAX_INT = 1 << 53
_WORDS = re.compile(r"[A-Za-z0-9_ .,:/-]{0,64}", re.ASCII)  # no piece of a control token
_OPTION: Schema = {
    "anyOf": [
        {"type": "string", "pattern": f"^{_WORDS.pattern}$"},
        {"type": ["boolean", "null"]},
        {"type": "number", "minimum": -_MAX_INT, "maximum": _MAX_INT},
    ]
}
_OPTIONS: Schema = {"type": "object", "additionalProperties": _OPTION, "maxProperties": MAX_OPTIONS}

OptionValue = bool | int | float | str


class TemplateUse(msgspec.Struct, frozen=True):
    """``opens_answer``: the prompt ends where the answer begins. ``continues``: it ends within the last message, which is the model's.
    ``options``: variables of the template. ``thinking``: whether the model thinks, if the request says so. ``begins_answer``: text of
    ours, control tokens included, with which the answer begins; it is a part of the prompt."""

    opens_answer: bool = True
    continues: bool = False
    options: Mapping[str, OptionValue] = {}
    thinking: Thinking | None = None
    begins_answer: str = ""


def read_template_use(fields: Fields) -> TemplateUse:
    """Take the fields. Raises: RequestError."""
    opens = fields.take_flag("add_generation_prompt")
    continues = fields.take_bool("continue_final_message")
    if opens and continues:
        raise refuse("continue_final_message", "is true, and so is add_generation_prompt; give one of them")
    return TemplateUse(not continues and opens is not False, continues, read_options(fields), read_thinking(fields))


def read_options(fields: Fields) -> dict[str, OptionValue]:
    """Take the options of the template. Raises: RequestError."""
    value = fields.take(OPTIONS, _OPTIONS)
    options = Fields({} if value is None else value, OPTIONS)
    if len(options.leftover) > MAX_OPTIONS:
        raise refuse(OPTIONS, f"has {len(options.leftover)} entries, the limit is {MAX_OPTIONS}")
    return {name: _checked(options.path(name[:64]), found) for name, found in options.leftover.items() if found is not None}


def _checked(path: str, value: Any) -> OptionValue:
    """Return a value that cannot bring control tokens into the prompt."""
    if isinstance(value, str) and _WORDS.fullmatch(value):
        return value
    if isinstance(value, bool | int | float) and abs(value) <= _MAX_INT:
        return value
    allowed = "true, false, numbers up to 2^53, and up to 64 letters, digits, spaces and _ . , : / -"
    raise refuse(path, f"is {show(value)}, allowed are {allowed}")


def for_template(use: TemplateUse, known: frozenset[str]) -> dict[str, OptionValue]:
    """Return the options that the template, whose variables are ``known``, has a variable for. The others have no effect. Raises:
    RequestError for these, with strict fields."""
    options = use.options if use.thinking is None else use.thinking.among(use.options, known)
    for name, value in options.items():
        if name in known:
            continue
        path, takes = f"{OPTIONS}.{name[:64]}", f"takes {', '.join(sorted(known))}" if known else "takes none"
        if name in SWITCHES and isinstance(value, bool):
            note(path, NO_SWITCH)
        else:
            tolerate(path, f"is not supported; the model's chat template {takes}")
    return {name: value for name, value in options.items() if name in known}
