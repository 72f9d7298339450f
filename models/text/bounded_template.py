"""A Jinja sandbox in which no template runs for long or takes much memory: a step of its own in each loop, block and macro looks at the
time; operators, filters and string methods look at the size of what they would make, since a call into C cannot be ended.

``chat_template`` renders in it. Globals, filters and methods that no known chat template uses are left out (``_GLOBALS``, ``_FILTERS``,
``_METHODS``). Not bounded: the time to compare values that hold the same list many times over.
"""

import functools
import itertools
import json
import re
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Any

import jinja2
import jinja2.filters
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

MAX_RENDER_S = 2.0  # of processor time
MAX_CHARS = 1 << 24  # of one string, or entries of one list
MAX_WIDTH = 100  # that text is padded to or indented by, and characters that are stripped from it
_MAX_BITS = 1 << 16  # of one integer
_KEY = r"[^()%\n]{0,100}"  # of what % formats
STEP = "_step"
_GLOBALS = ("range", "dict", "joiner", "cycler")
_FILTERS = (
    "abs capitalize count d default dictsort first float items last length list lower max min reverse safe sort title unique"
    " upper wordcount"
)
_TEXT_METHODS = (
    "strip lstrip rstrip split rsplit splitlines partition rpartition startswith endswith removeprefix removesuffix find index count"
    " replace join lower upper title capitalize casefold swapcase isalnum isalpha isascii isdecimal isdigit islower"
    " isnumeric isspace istitle isupper"
)
_METHODS = {str: _TEXT_METHODS.split(), dict: ["copy", "get", "items", "keys", "values"], list: ["copy", "index", "count"]}


class TemplateLimit(jinja2.TemplateError):
    """The template takes too long or makes too much."""


class Deadline:
    """The deadline of one render. Called at each step. Raises: TemplateLimit."""

    def __init__(self) -> None:
        self._end_s = time.thread_time() + MAX_RENDER_S

    def __call__(self) -> None:
        if time.thread_time() > self._end_s:
            raise TemplateLimit(f"it takes more than {MAX_RENDER_S:g} s")


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Templates of it are rendered with a ``Deadline`` as their variable ``STEP``."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_checked, **options)
        self.filters = {name: jinja2.filters.FILTERS[name] for name in _FILTERS.split()} | _bounded_filters()
        self.globals = {name: self.globals[name] for name in _GLOBALS} | {"namespace": _Namespace}

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the pieces of a template, macro or block."""
        return "".join(_bounded(parts, "the text"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template = super()._parse(source, name, filename)
        if any(found.name == STEP for found in template.find_all(jinja2.nodes.Name)):
            raise jinja2.TemplateSyntaxError(f"{STEP} is no name for a variable", 1, name, filename)
        kinds = (jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.Block)
        repeated: Any
        for repeated in itertools.chain.from_iterable(template.find_all(kind) for kind in kinds):
            step = jinja2.nodes.Call(jinja2.nodes.Name(STEP, "load"), [], [], None, None)
            repeated.body.insert(0, jinja2.nodes.ExprStmt(step, lineno=repeated.lineno))
        _TildeAsPlus().visit(template)
        template.set_environment(self)
        return template

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and _size(left) + _size(right) > MAX_CHARS:
            raise TemplateLimit(f"+ makes more than {MAX_CHARS} characters or entries")
        if operator == "*" and max(_size(left) * _count(right), _size(right) * _count(left)) > MAX_CHARS:
            raise TemplateLimit(f"* makes more than {MAX_CHARS} characters or entries")
        if operator == "*" and _bits(left) + _bits(right) > _MAX_BITS:
            raise TemplateLimit(f"* makes an integer of more than {_MAX_BITS} bits")
        if operator == "**" and _bits(left) * _count(right) > _MAX_BITS:
            raise TemplateLimit(f"** makes an integer of more than {_MAX_BITS} bits")
        if operator == "%" and isinstance(left, str):
            _check_format(context, left, right)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Of Python's own values only the methods that templates use: others pad, encode or format without bound."""
        if isinstance(obj, str | bytes | int | float | dict | list | tuple | set | range):
            return attr in next((names for kind, names in _METHODS.items() if isinstance(obj, kind)), ())
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` is left to ``is_safe_attribute``, which refuses it."""
        return None

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902
        text, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(text, str) and name == "replace":
            _check_replacement(text, *args, **kwargs)
        if isinstance(text, str) and name in ("strip", "lstrip", "rstrip"):
            check_short(args[0] if args else None, name)
        if isinstance(text, str) and name in ("rsplit", "rpartition"):  # C searches backwards in quadratic time
            check_short(args[0] if args else kwargs.get("sep"), name)
        if isinstance(text, str) and name == "join" and args:
            return text.join(_bounded(args[0], "join", len(text)))
        return super().call(__context, __obj, *args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    def __repr__(self) -> str:
        return "<Namespace>"  # Jinja's has the values, which nothing has counted


class _TildeAsPlus(jinja2.visitor.NodeTransformer):
    """``a ~ b`` becomes ``a | string + b | string``, which is the same and goes through ``call_binop``."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        texts = [jinja2.nodes.Filter(part, "string", [], [], None, None, lineno=node.lineno) for part in node.nodes]
        first: jinja2.nodes.Expr = texts[0]
        return functools.reduce(lambda left, right: jinja2.nodes.Add(left, right, lineno=node.lineno), texts[1:], first)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _count(value: Any) -> int:
    return max(value, 0) if isinstance(value, int) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def check_short(value: Any, name: str) -> None:
    """Raises: TemplateLimit for a number above ``MAX_WIDTH``, or a text longer than that."""
    if (value if isinstance(value, int) else _size(value)) > MAX_WIDTH:
        raise TemplateLimit(f"{name} has a width of more than {MAX_WIDTH}")


@jinja2.pass_context
def _checked(context: jinja2.runtime.Context, value: Any) -> Any:
    """``value``, of which text can be made. Raises: as ``_text_size``."""
    if not isinstance(value, str):
        _text_size(context, value)
    return value


def _text_size(context: jinja2.runtime.Context, value: Any) -> int:
    """Characters of ``value`` as text, roughly. A list may hold another many times over, and each of them is written.

    Raises:
        TemplateLimit: there are more than ``MAX_CHARS`` in a list or dictionary, or counting them takes too long.
    """
    step, size, pending = context.resolve(STEP), 0, [value]
    while pending:
        entry = pending.pop()
        if isinstance(entry, dict | list | tuple | KeysView | ValuesView | ItemsView):
            step()
            pending += entry.items() if isinstance(entry, dict) else entry
        size += _size(entry) + 1
        if size > MAX_CHARS and entry is not value:
            raise TemplateLimit(f"a list or dictionary has more than {MAX_CHARS} characters as text")
    return size


def _bounded(parts: Iterable[Any], name: str, num_between: int = 0) -> list[Any]:
    kept, size = [], 0
    for part in parts:
        kept.append(part)
        size += _size(part) + num_between
        if size > MAX_CHARS:
            raise TemplateLimit(f"{name} has more than {MAX_CHARS} characters")
    return kept


def _check_format(context: jinja2.runtime.Context, format: str, values: Any) -> None:
    if re.search(r"%\((?!" + _KEY + r"\))", format):
        raise TemplateLimit("% names a key with parentheses or of more than 100 characters")
    fields = re.findall(rf"%(?:\({_KEY}\))?([-+ #0-9.*hlL]*)", format)
    if any("*" in field or any(int(width) > MAX_WIDTH for width in re.findall(r"\d+", field)) for field in fields):
        raise TemplateLimit(f"% formats with a width of more than {MAX_WIDTH} or one that is computed")
    entries = values if isinstance(values, tuple) else values.values() if isinstance(values, dict) else [values]
    size = sum(_text_size(context, entry) for entry in entries)
    if isinstance(values, dict):  # whose entries may be named many times
        size *= len(fields)
    if len(format) + MAX_WIDTH * len(fields) + size > MAX_CHARS:
        raise TemplateLimit(f"% makes more than {MAX_CHARS} characters")


def _check_replacement(text: str, old: str, new: str, count: int = -1) -> None:
    num_found = text.count(old) if count is None or count < 0 else min(text.count(old), count)
    if len(text) + num_found * (len(new) - len(old)) > MAX_CHARS:
        raise TemplateLimit(f"replace makes more than {MAX_CHARS} characters")


def _each(context: jinja2.runtime.Context, values: Iterable[Any]) -> Iterator[Any]:
    step = context.resolve(STEP)
    for value in values or ():
        step()
        yield value


def _bounded_filters() -> dict[str, Callable[..., Any]]:
    """Jinja's filters whose results can be larger than what they are given, or that call others for each entry."""
    filters: dict[str, Callable[..., Any]] = {
        function.__name__.strip("_"): jinja2.pass_context(function)
        for function in (_escape, _indent, _int, _join, _replace, _string, _sum, _tojson, _trim)
    }
    filters["e"] = filters["escape"]
    for name in ("map", "select", "reject", "selectattr", "rejectattr"):
        filters[name] = _stepped(jinja2.filters.FILTERS[name])
    return filters


def _stepped(filter: Callable[..., Any]) -> Callable[..., Any]:
    @jinja2.pass_context
    def stepped(context: jinja2.runtime.Context, values: Any, *args: Any, **kwargs: Any) -> Any:
        return filter(context, _each(context, values), *args, **kwargs)

    return stepped


def _escape(context: jinja2.runtime.Context, value: Any) -> str:
    text = _string(context, value)
    if len(text) + 4 * sum(map(text.count, "&<>'\"")) > MAX_CHARS:
        raise TemplateLimit(f"escape makes more than {MAX_CHARS} characters")
    escaped: str = jinja2.filters.FILTERS["escape"](value)
    return escaped


def _indent(context: jinja2.runtime.Context, text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    check_short(width, "indent")
    if len(text) + (len(text.splitlines()) + 1) * (_size(width) or _count(width)) > MAX_CHARS:
        raise TemplateLimit(f"indent makes more than {MAX_CHARS} characters")
    return str(jinja2.filters.do_indent(text, width, first, blank))


def _int(context: jinja2.runtime.Context, value: Any, default: int = 0, base: int = 10) -> int:
    check_short(value if isinstance(value, str) else None, "int")
    return int(jinja2.filters.do_int(value, default, base))


def _join(context: jinja2.runtime.Context, values: Any, d: Any = "", attribute: str | int | None = None) -> str:
    get: Callable[[Any], Any] = jinja2.filters.make_attrgetter(context.environment, attribute)
    between = str(d)
    return between.join(_bounded((_string(context, get(value)) for value in _each(context, values)), "join", len(between)))


def _replace(context: jinja2.runtime.Context, text: Any, old: Any, new: Any, count: int | None = None) -> str:
    arguments = (str(old), str(new), -1 if count is None else count)
    _check_replacement(str(text), *arguments)
    return str(text).replace(*arguments)


def _string(context: jinja2.runtime.Context, value: Any) -> str:
    return str(_checked(context, value))


def _sum(context: jinja2.runtime.Context, values: Any, attribute: str | int | None = None, start: float = 0) -> float:
    if not isinstance(start, int | float):
        raise TemplateLimit("sum adds numbers only")
    get: Callable[[Any], Any] = jinja2.filters.make_attrgetter(context.environment, attribute)
    return sum((get(value) for value in _each(context, values)), start)


def _tojson(
    context: jinja2.runtime.Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, as transformers has it: Jinja's own filter escapes for HTML."""
    for width in (indent, *(separators or ())):
        check_short(width, "tojson")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return "".join(_bounded(_each(context, encoder.iterencode(_checked(context, value))), "tojson"))


def _trim(context: jinja2.runtime.Context, text: Any, chars: str | None = None) -> str:
    check_short(chars, "trim")
    return str(text).strip(chars)
