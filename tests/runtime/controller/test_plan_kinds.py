"""Each kind of plan is one file: the table has all, and no other code of the runtime asks for a plan's type."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import mmrt
from mmrt.runtime.bus.plans import Plan
from mmrt.runtime.controller.plans.kinds.table import KINDS

RUNTIME = Path(mmrt.__file__).parent / "runtime"
OWN = RUNTIME / "controller" / "plans" / "kinds"
NAMES = {kind.__name__ for kind in get_args(Plan)}


def test_the_table_has_all_kinds() -> None:
    assert list(KINDS) and set(KINDS) == set(get_args(Plan))
    assert len({type(kind).__module__ for kind in KINDS.values()}) == len(KINDS)


def questions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what asks for a type of plan: calls of isinstance, and cases."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            asked: ast.AST = node.args[1]
        elif isinstance(node, ast.MatchClass):
            asked = node.cls
        else:
            continue
        if any(isinstance(name, ast.Name) and name.id in NAMES for name in ast.walk(asked)):
            yield node


def test_nobody_else_asks_for_the_type() -> None:
    assert list(questions(ast.parse("isinstance(plan, Load | Prefill)"))), "the test sees such a question"
    files = [file for file in RUNTIME.rglob("*.py") if not file.is_relative_to(OWN)]
    assert len(files) > 100
    found = [f"{file.relative_to(RUNTIME)}:{node.lineno}" for file in files for node in questions(ast.parse(file.read_text()))]  # type: ignore[attr-defined]
    assert found == []
