"""msgspec describes a Struct to itself when it is first decoded, and crashes where two threads do that at once (seen with 0.22).

Actors may be threads of one process, so every module that they share makes its decoders while it is imported.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import mmrt

ROOT = Path(mmrt.__file__).parent
PLACES = ("actors", "models", "media", "runtime", "schema", "shm")
SAFE = ("actors/gateway/grammar/process.py", "models/families/qwen3/times.py")  # a process without actors; a type of the call's own


def decodes_at_first_use(source: str) -> Iterator[int]:
    """The lines that decode by ``type=``, or make a ``Decoder`` within a function."""
    if "msgspec." not in source:
        return
    tree = ast.parse(source)
    within = {node for function in ast.walk(tree) if isinstance(function, ast.FunctionDef) for node in ast.walk(function)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("decode", "Decoder")
            and ast.unparse(node.func).startswith("msgspec.")
        ):
            typed = node.func.attr == "decode" and any(keyword.arg == "type" for keyword in node.keywords)
            if typed or (node.func.attr == "Decoder" and node in within):
                yield node.lineno


def test_decoders_are_made_by_imports() -> None:
    files = [file for place in PLACES for file in (ROOT / place).rglob("*.py")]
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in decodes_at_first_use(file.read_text())]
    assert [where for where in found if not where.startswith(SAFE)] == []
    assert len(files) > 100


@pytest.mark.parametrize("call", ["msgspec.json.decode(x, type=A)", "msgspec.msgpack.Decoder(A)"])
def test_both_forms_are_found(call: str) -> None:
    assert list(decodes_at_first_use(f"def f(x):\n    return {call}")) == [2]
