"""llguidance's text for a client's wish. The gateway's grammar process makes it, and compiles it once; decode compiles it again."""

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from llguidance import LLMatcher

from ..errors import GrammarError
from ..text.tool_calls import CLOSING, OPENING
from .call_form import CallForm, Function, form_of
from .held_schema import Dropped, hold
from .regex_tree import check_size
from .source import GrammarSource

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_TEXT_BYTES = 49_152  # of the 65,536 of a row's description
_BETWEEN, _HEAD, _TAIL = "\n", '\n{"name": "', f"}}\n{CLOSING}"
# Between the parts of JSON may stand nothing, a space, or a line's end with an indentation: a model that likes blanks must not write
# them for ever.
_SPACED: "JsonCompileOptions" = {
    "whitespace_flexible": True,
    "whitespace_pattern": r" |\n[ \t]{0,40}",
    "item_separator": ",",
    "key_separator": ":",
}
# Arguments of calls stand as chat templates show them to the model (``tojson``), with no blanks for it to choose.
_LARK_REGEX = re.compile(r'"(?:[^"\\\n]|\\.)*"|/((?:[^/\\\n]|\\.)+)/')
_AS_SHOWN: "JsonCompileOptions" = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class HeldText(NamedTuple):
    """llguidance's text, and what of the source's schemas it does not hold."""

    text: str
    dropped: list[Dropped]


def grammar_text(source: GrammarSource, *, is_open: bool = False) -> str:
    """As ``held_text``, the text alone."""
    return held_text(source, is_open=is_open).text


def held_text(source: GrammarSource, *, is_open: bool = False) -> HeldText:
    """Return llguidance's text. It is not compiled: that finds the other errors. ``is_open``: as of ``hold``.

    Raises: GrammarError if it is too long, has a regular expression that is too large, or under strict for what OpenAI refuses.
    """
    held = _text(source, is_open)
    if (num_bytes := len(held.text.encode())) > MAX_TEXT_BYTES:
        raise GrammarError(f"has {num_bytes} bytes as a grammar of llguidance, the limit is {MAX_TEXT_BYTES}")
    return held


def _text(source: GrammarSource, is_open: bool) -> HeldText:
    match source.kind:
        case "regex":
            check_size(source.text)
            return HeldText(LLMatcher.grammar_from_regex(source.text), [])
        case "lark":
            for regex in _LARK_REGEX.finditer(source.text):
                check_size(regex[1] or "")
            return HeldText(LLMatcher.grammar_from_lark(source.text), [])
        case "calls":
            return _calls_text(form_of(source), is_open)
    return _schema_text(json.loads(source.text), source.is_strict, is_open)


def schemas_of(source: GrammarSource) -> list[tuple[str, Any]]:
    """Return the JSON schemas in a source, with the pointers to them."""
    if source.kind == "calls":
        return [(function.pointer, function.schema) for function in form_of(source).functions]
    return [("", json.loads(source.text))] if source.kind == "json_schema" else []


def _calls_text(form: CallForm, is_open: bool) -> HeldText:
    """Return llguidance's text for calls in the form that ``tool_calls`` reads: a grammar of all but the arguments, and those of these.

    A lazy rule ends with the first opening that comes, so none stands in a text without a call behind it.
    """
    arguments = [_arguments_text(function, is_open) for function in form.functions]
    texts, dropped = [held.text for held in arguments], [one for held in arguments for one in held.dropped]
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}  # equal schemas share a grammar
    names = " | ".join(
        _literal(f'{function.name}", "arguments": ') + f" @f{numbers[text]}"
        for function, text in zip(form.functions, texts, strict=True)
    )
    call = f"call: {_literal(_HEAD)} ({names}) {_literal(_TAIL)}"
    text, first, more = "TEXT: /(.|\\n)*/", f"first: {_literal(OPENING)} call", f"more: {_literal(_BETWEEN + OPENING)} call"
    head = f"head[lazy]: TEXT {_literal(OPENING)}"
    calls = "first" if form.is_single else "first more*"
    if form.is_required:
        rules = [f"start: {calls}", first, more, call]
    elif form.answer is not None:
        rules = [f"start: @answer | {calls}", first, more, call]
    elif form.is_single:
        rules = ["start: TEXT | head call", text, head, call]
    else:
        rules = ["start: (head call)* TEXT", text, head, call]
    grammars = [{"lark_grammar": "\n".join(rules)}]
    grammars += [{**_grammar_in(text), "name": f"f{number}"} for text, number in numbers.items()]
    if form.answer is not None and not form.is_required:
        is_lark = form.answer.kind == "lark"
        answer = {"lark_grammar": form.answer.text} if is_lark else _grammar_in(_text(form.answer, is_open).text)
        grammars.append({**answer, "name": "answer"})
    return HeldText(json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":")), dropped)


def _arguments_text(function: Function, is_open: bool) -> HeldText:
    """Return the text for a function's arguments. Raises: GrammarError, which says where in the request."""
    try:
        held = _schema_text(function.schema, function.is_strict, is_open, _AS_SHOWN)
    except GrammarError as error:
        raise GrammarError(error.message, function.pointer + error.pointer) from None
    return held._replace(dropped=[one._replace(pointer=function.pointer + one.pointer) for one in held.dropped])


def _grammar_in(text: str) -> dict[str, Any]:
    """Return the one grammar in a text of llguidance."""
    (grammar,) = json.loads(text)["grammars"]
    return {name: value for name, value in grammar.items() if value is not None}


def _literal(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text)


def _schema_text(schema: Any, is_strict: bool, is_open: bool, spaces: "JsonCompileOptions" = _SPACED) -> HeldText:
    """Return llguidance's text for a JSON schema. ``spaces``: its options for what may stand between the parts of the JSON text.
    Escapes of printable characters are off, so that no key can be written in two ways.

    Raises: GrammarError for a text that llguidance cannot read, say with a number beyond float64.
    """
    held = hold(schema, is_open=is_open)
    if is_strict and (refused := next((one for one in held.dropped if one.is_refused), None)) is not None:
        raise GrammarError(f"{refused.reason}, and strict is true; without strict it is ignored", refused.pointer)
    options: JsonCompileOptions = {"lenient": False, "coerce_one_of": False, "json_allow_general_unicode_escapes": False}
    try:
        text = json.dumps(held.schema, ensure_ascii=False, separators=(",", ":"))
        return HeldText(LLMatcher.grammar_from_json_schema(text, overrides={**options, **spaces}), held.dropped)
    except ValueError as error:
        raise GrammarError(str(error)) from None
