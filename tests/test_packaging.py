"""The explicit package list names every package of the tree, and nothing else would be installed."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOT_INSTALLED = {"tests", "docs", "examples", "build", "dist"}


def test_package_list_matches_the_tree() -> None:
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"mmrt"}
    for init in ROOT.rglob("__init__.py"):
        parts = init.parent.relative_to(ROOT).parts
        if parts and not any(part.startswith(".") or part in NOT_INSTALLED or part.endswith(".egg-info") for part in parts):
            found.add(".".join(("mmrt", *parts)))
    assert declared == found


def test_every_file_of_the_demo_model_is_installed() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["mmrt"]
    files = [path for path in (ROOT / "models" / "demo").rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if not any(path.relative_to(ROOT).match(pattern) for pattern in patterns)] == []


def test_no_module_but_the_package_and_the_program_stands_at_the_root() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_the_tests_see_this_tree() -> None:
    import mmrt

    assert mmrt.__file__ is not None
    assert Path(mmrt.__file__).resolve().parent == ROOT.resolve()
