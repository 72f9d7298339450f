"""Find the package's modules that a program imports, from the source, without running it (pure). Called by ``reload``.

A module's imports are the ``import`` statements anywhere in it (also in functions, which may run later), except those under
``if TYPE_CHECKING``, and ``importlib.import_module`` with a literal name. Names built at run time cannot
be seen: callers of ``closure`` name those modules as roots.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping, Set


def imports_of(tree: ast.AST, module: str, is_package: bool) -> frozenset[str]:
    """Return every dotted name that ``module``, parsed, may import; ``from a import b`` counts as a and as a.b."""
    package = module if is_package else module.rpartition(".")[0]
    found: set[str] = set()
    for node in _runtime_nodes(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute("." * node.level + (node.module or ""), package)
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _is_import_module(node.func) and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found.add(_absolute(name.value, package))
    return frozenset(found)


def _runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and _name(node.test).rpartition(".")[2] == "TYPE_CHECKING":
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def _is_import_module(function: ast.AST) -> bool:
    return _name(function).rpartition(".")[2] == "import_module"


def _name(node: ast.AST) -> str:
    """Return the dotted name of an expression, "" if it is none."""
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _absolute(name: str, package: str) -> str:
    """``..x`` as seen from ``package``."""
    relative = name.lstrip(".")
    level = len(name) - len(relative)
    if level == 0:
        return name
    parents = package.split(".")
    base = ".".join(parents[: max(1, len(parents) - level + 1)])
    return f"{base}.{relative}" if relative else base


def closure(roots: Iterable[str], imports: Mapping[str, Set[str]]) -> frozenset[str]:
    """Return the modules of ``imports`` that importing ``roots`` runs: themselves, their imports, and the packages around each.

    Names that are not keys of ``imports`` are attributes or foreign modules, and are left out.
    """
    reached: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        if name in imports:
            reached.add(name)
            waiting += imports[name]
        parent = name.rpartition(".")[0]
        if parent:
            waiting.append(parent)
    return frozenset(reached)
