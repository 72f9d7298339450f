"""Nothing in mmrt runs code out of data: no pickle on a wire or at load, no eval (a class of remote execution in other servers).

Over the syntax tree of everything that is installed. Benches alone may use multiprocessing: the bus bench measures its queue, and
children of a bench get their arguments by it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "ruamel", "code", "codeop"}
PICKLING = {"multiprocessing"}  # its queues, pipes and managers pickle
BENCHES = {
    "lab/mmrt_lab/micro/burst.py",
    "lab/mmrt_lab/micro/links.py",
    "lab/mmrt_lab/micro/peer.py",
    "lab/mmrt_lab/planner/pool.py",
}
NAMES = {"eval", "exec", "compile", "__import__"}
METHODS = {"recv_pyobj", "send_pyobj", "load_module"}
OPTIONS = {"trust_remote_code", "allow_pickle"}
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
    "shm",
    "triton_kernels",
)
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def offences(source: str, where: str = "") -> Iterator[str]:
    """What in ``source`` could run code out of data."""
    banned = MODULES if where in BENCHES else MODULES | PICKLING
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"imports {alias.name}" for alias in node.names if alias.name.split(".")[0] in banned)
        elif isinstance(node, ast.ImportFrom):
            if not node.level and (node.module or "").split(".")[0] in banned:
                yield f"imports from {node.module}"
        elif isinstance(node, ast.keyword):
            wants = not (isinstance(node.value, ast.Constant) and node.value.value is False)
            if node.arg in OPTIONS and wants:
                yield f"says {node.arg}"
            if node.arg == "weights_only" and not (isinstance(node.value, ast.Constant) and node.value.value is True):
                yield "does not say weights_only=True"
        elif isinstance(node, ast.Call):
            yield from _call_offences(node)


def _call_offences(call: ast.Call) -> Iterator[str]:
    function = call.func
    if isinstance(function, ast.Name) and function.id in NAMES:
        yield f"calls {function.id}"
    elif isinstance(function, ast.Attribute):
        owner = function.value
        if function.attr in METHODS:
            yield f"calls {function.attr}"
        called = f"{owner.id}.{function.attr}" if isinstance(owner, ast.Name) else ""
        if called in {"builtins.eval", "builtins.exec"}:
            yield f"calls {called}"
        if called == "torch.load" and not any(keyword.arg == "weights_only" for keyword in call.keywords):
            yield "calls torch.load without weights_only=True"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_runs_no_data(path: Path) -> None:
    assert list(offences(path.read_text(), str(path.relative_to(ROOT)))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, dill as os2",
        "from marshal import loads",
        "import shelve",
        "import yaml; yaml.load('x')",
        "from multiprocessing import Queue",
        "eval('1')",
        "exec(code)",
        "torch.load(f, weights_only=False)",
        "torch.load(f)",
        "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=flag)",
        "socket.recv_pyobj()",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "__import__(name)",
    ],
)
def test_the_test_sees_each_of_them(source: str) -> None:
    assert list(offences(source))


@pytest.mark.parametrize(
    "source",
    ["np.load(f, allow_pickle=False)", "torch.load(f, weights_only=True)", "re.compile('x')", "model.eval()", "from .code import x"],
)
def test_the_test_knows_what_is_harmless(source: str) -> None:
    assert not list(offences(source))
