"""Print which lanes a change concerns, one a line: lab, demo_model, kernels.

Usage: concerned.py [REVISION]    what differs from this commit in the working tree; without one, or of one that is unknown: all lanes

A lane is concerned by its own folder, by what that imports, as read from the sources, and by the lists of packages. Modules that are
imported by a name made at run time, such as the actors of the runs that tests of the lab start, are not among these: the ordinary
tests have them, and the nightly run has all lanes.
"""

import ast
import subprocess
import sys
from pathlib import Path

from mmrt.runtime.supervisor.import_graph import closure, imports_of

ROOT = Path(__file__).parents[1]
LANES = {
    "lab": ("lab/",),
    "demo_model": ("demo_model/", "models/demo/"),
    "kernels": ("triton_kernels/", "lab/mmrt_lab/budgets/"),
}
ALWAYS = ("pyproject.toml", "lab/pyproject.toml", "tests/settings.py", ".ci/run", ".ci/concerned.py")
ROOTS = {"lab/mmrt_lab": "mmrt_lab", "demo_model/mmrt_demo_model": "mmrt_demo_model"}  # all else belongs to mmrt


def git(*arguments: str) -> list[str]:
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True).stdout.splitlines()


def module_of(path: str) -> str:
    """``lab/mmrt_lab/sim/rows.py``: ``mmrt_lab.sim.rows``."""
    for folder, package in ROOTS.items():
        if path.startswith(f"{folder}/"):
            path = package + path.removeprefix(folder)
            break
    else:
        path = f"mmrt/{path}"
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def concerned(changed: list[str], sources: list[str]) -> list[str]:
    """Return the lanes that these files concern, among all Python files of the tree and those that were removed."""
    paths = {module_of(path): path for path in sources}
    imports = {}
    for module, path in paths.items():
        source = (ROOT / path).read_bytes() if (ROOT / path).exists() else b""
        imports[module] = imports_of(ast.parse(source), module, path.endswith("__init__.py"))
    lanes = []
    for lane, folders in LANES.items():
        used = {paths[module] for module in closure([name for name, path in paths.items() if path.startswith(folders)], imports)}
        if any(path in used or path.startswith(folders) or path in ALWAYS for path in changed):
            lanes.append(lane)
    return lanes


def main() -> None:
    try:
        changed = git("diff", "--name-only", f"{sys.argv[1]}^{{commit}}")
    except (IndexError, subprocess.CalledProcessError):
        lanes = list(LANES)
    else:
        lanes = concerned(changed, [*git("ls-files", "*.py"), *(path for path in changed if path.endswith(".py"))])
    print("\n".join(lanes), end="\n" if lanes else "")


if __name__ == "__main__":
    main()
