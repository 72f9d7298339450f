"""Nothing in mmrt unpickles: not on a wire, not at load (a class of remote code execution in other servers)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BANNED_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
BANNED_CALLS = {"recv_pyobj", "send_pyobj", "eval", "exec"}
SOURCES = sorted(
    path
    for folder in ("actors", "bench", "media", "models", "runtime", "shm", "triton_kernels")
    for path in (ROOT / folder).rglob("*.py")
)


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_is_free_of_pickle(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not BANNED_MODULES & {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in BANNED_MODULES
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert name_of(node) not in BANNED_CALLS
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert name_of(node) not in {"recv_pyobj", "send_pyobj"}
            owner = node.func.value
            assert not (node.func.attr == "load" and isinstance(owner, ast.Name) and owner.id == "torch")
        if isinstance(node, ast.keyword):
            assert node.arg != "trust_remote_code"
