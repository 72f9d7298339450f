"""A Jinja sandbox in which no template runs for long or takes much memory: a step of its own in each loop and macro looks at the
time, and operators look at the size of what they would make.

``chat_template`` renders in it. What filters and string methods make is not bounded (``center``, ``format``).
"""

import functools
import itertools
import time
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

MAX_RENDER_S = 2.0  # of processor time
MAX_CHARS = 1 << 26  # of one string, or entries of one list
_MAX_BITS = 1 << 16  # of one integer
STEP = "_step"


class TemplateLimit(jinja2.TemplateError):
    """The template takes too long or makes too much."""


class Deadline:
    """One render's. Called at each step. Raises: TemplateLimit."""

    def __init__(self) -> None:
        self._end_s = time.thread_time() + MAX_RENDER_S

    def __call__(self) -> None:
        if time.thread_time() > self._end_s:
            raise TemplateLimit(f"it takes more than {MAX_RENDER_S:g} s")


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Templates of it are rendered with a ``Deadline`` as their variable ``STEP``."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template = super()._parse(source, name, filename)
        loops, macros = template.find_all(jinja2.nodes.For), template.find_all(jinja2.nodes.Macro)
        repeated: jinja2.nodes.For | jinja2.nodes.Macro
        for repeated in itertools.chain[Any](loops, macros):
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
        return super().call_binop(context, operator, left, right)


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
