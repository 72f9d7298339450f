"""A file has at most 400 lines, and a function at most 60. Kernels may be longer."""

import ast
from pathlib import Path

import mmrt

MAX_FILE, MAX_FUNCTION = 450, 60
FOLDERS = (
    "actors",
    "bench",
    "cli",
    "cluster",
    "cpu_kernels",
    "lab/mmrt_lab",
    "media",
    "models",
    "runtime",
    "schema",
    "serving",
    "shm",
    "triton_kernels",
)


def test_files_and_functions_fit() -> None:
    root = Path(mmrt.__file__).parent
    too_long = []
    for file in sorted(file for folder in FOLDERS for file in (root / folder).rglob("*.py")):
        text = file.read_text()
        if (count := text.count("\n")) > MAX_FILE:
            too_long.append(f"{file.relative_to(root)}: {count}")
        for node in ast.walk(ast.parse(text)) if file.name != "kernel.py" else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= MAX_FUNCTION:
                too_long.append(f"{file.relative_to(root)}, {node.name}: {node.end_lineno - node.lineno + 1}")
    assert too_long == []
