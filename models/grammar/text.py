"""llguidance's text for a client's wish. The gateway's grammar process makes it, and compiles it once; decode compiles it again."""

import json
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

from ..errors import GrammarError
from ..text.tool_calls import CLOSING, OPENING
from .call_form import CallForm, Function, form_of
from .json_schema import check_schema
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
_AS_SHOWN: "JsonCompileOptions" = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def grammar_text(source: GrammarSource) -> str:
    """Return llguidance's text. It is not compiled: that finds the other errors.

    Raises: GrammarError if it is too long, or for a schema with keywords whose meaning a grammar cannot hold.
    """
    text = _text(source)
    if (num_bytes := len(text.encode())) > MAX_TEXT_BYTES:
        raise GrammarError(f"has {num_bytes} bytes as a grammar of llguidance, the limit is {MAX_TEXT_BYTES}")
    return text


def _text(source: GrammarSource) -> str:
    if source.kind == "regex":
        return LLMatcher.grammar_from_regex(source.text)
    if source.kind == "lark":
        return LLMatcher.grammar_from_lark(source.text)
    if source.kind == "calls":
        return _calls_text(form_of(source))
    check_schema(json.loads(source.text))
    return schema_text(source.text)


def schemas_of(source: GrammarSource) -> list[tuple[str, Any]]:
    """Return the JSON schemas in a source, with the pointers to them."""
    if source.kind == "calls":
        return [(function.pointer, function.schema) for function in form_of(source).functions]
    return [("", json.loads(source.text))] if source.kind == "json_schema" else []


def _calls_text(form: CallForm) -> str:
    """Return llguidance's text for calls in the form that ``tool_calls`` reads: a grammar of all but the arguments, and those of these.

    A lazy rule ends with the first opening that comes, so none stands in a text without a call behind it.
    """
    texts = [_arguments_text(function) for function in form.functions]
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
        grammars.append({**({"lark_grammar": form.answer.text} if is_lark else _grammar_in(_text(form.answer))), "name": "answer"})
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _arguments_text(function: Function) -> str:
    """Return the text for a function's arguments. Raises: GrammarError, which says where in the request."""
    try:
        check_schema(function.schema)
        return schema_text(json.dumps(function.schema), _AS_SHOWN)
    except GrammarError as error:
        raise GrammarError(error.message, function.pointer + error.pointer) from None


def _grammar_in(text: str) -> dict[str, Any]:
    """Return the one grammar in a text of llguidance."""
    (grammar,) = json.loads(text)["grammars"]
    return dict(grammar)


def _literal(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text)


def schema_text(schema: str, spaces: "JsonCompileOptions" = _SPACED) -> str:
    """Return llguidance's text for a JSON schema. ``spaces``: its options for what may stand between the parts of the JSON text.
    Escapes of printable characters are off, so that no key can be written in two ways.

    Raises: GrammarError for a text that llguidance cannot read, say with a number beyond float64.
    """
    options: JsonCompileOptions = {"lenient": False, "coerce_one_of": False, "json_allow_general_unicode_escapes": False}
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides={**options, **spaces})
    except ValueError as error:
        raise GrammarError(str(error)) from None
