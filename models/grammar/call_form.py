"""The form of answers that call functions, each with arguments of its schema. Pure and cheap, like ``source``."""

import json
from typing import Any

import msgspec

from ..errors import GrammarError
from .source import MAX_CALLS_BYTES, GrammarSource, checked


class Function(msgspec.Struct, frozen=True):
    """A function. ``pointer``: the place of its schema in the request, for errors. ``is_strict``: as of a ``GrammarSource``."""

    pointer: str
    name: str
    schema: dict[str, Any]
    is_strict: bool = False


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """``is_required``: the answer is calls and nothing else. ``is_single``: one call at most. ``answer``: the form of an answer without
    calls; None: any text, with calls anywhere in it."""

    functions: list[Function]
    is_required: bool
    is_single: bool
    answer: GrammarSource | None = None


_decode = msgspec.json.Decoder(CallForm).decode


def source_of_calls(form: CallForm) -> GrammarSource:
    """Return the source for answers of this form. Raises: GrammarError if it is too long."""
    try:
        text = json.dumps(msgspec.to_builtins(form), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise GrammarError(str(error)) from None
    return GrammarSource("calls", checked(text, MAX_CALLS_BYTES))


def form_of(source: GrammarSource) -> CallForm:
    """Return the form of a source of calls."""
    return _decode(source.text)
