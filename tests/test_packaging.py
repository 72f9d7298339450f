"""The explicit package list names every package of the tree, and nothing else would be installed."""

import itertools
import os
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOT_INSTALLED = {"tests", "docs", "examples", "lab", "demo_model", "build", "dist"}


def test_package_list_matches_the_tree() -> None:
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"mmrt"}
    for init in ROOT.rglob("__init__.py"):
        parts = init.parent.relative_to(ROOT).parts
        if parts and not any(part.startswith(".") or part in NOT_INSTALLED or part.endswith(".egg-info") for part in parts):
            found.add(".".join(("mmrt", *parts)))
    assert declared == found


@pytest.mark.parametrize("folder", ["models/demo", "actors/gateway/page/static", "dashboards"])
def test_every_file_that_is_data_is_installed(folder: str) -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["mmrt"]
    files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if not any(path.relative_to(ROOT).match(pattern) for pattern in patterns)] == []


def test_no_module_but_the_package_and_the_program_stands_at_the_root() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py", "setup.py"}  # the last is not installed


def test_the_tests_see_this_tree() -> None:
    import mmrt

    assert mmrt.__file__ is not None
    assert Path(mmrt.__file__).resolve().parent == ROOT.resolve()


def test_every_dependency_has_an_upper_bound_and_this_run_is_within() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    for requirement in [*project["dependencies"], *itertools.chain(*optional.values())]:
        match = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?(?:==([\d.]+)|>=([\d.]+),<([\d.]+))", requirement)
        assert match, f"{requirement}: neither name==version nor name>=oldest,<bound"
        name, exact, oldest, bound = match.groups()
        if requirement in project["dependencies"] or requirement in optional["test"]:
            installed = _parts(version(name))
            assert installed == _parts(exact) if exact else _parts(oldest) <= installed < _parts(bound), f"{name} {version(name)}"


def _parts(number: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", number.partition("+")[0])]


def test_a_wheel_is_built_outside_the_tree(tmp_path: Path) -> None:
    """It holds the package and not the script that builds it. Made by the backend that pip calls, without the network."""
    tree = tmp_path / "tree"
    tracked = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "__init__.py", "__main__.py", "py.typed")
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    for name in [*tracked, *(f"{package.removeprefix('mmrt.').replace('.', '/')}/__init__.py" for package in packages[1:])]:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes((ROOT / name).read_bytes())
    before = sorted(tree.rglob("*"))
    program = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    built = subprocess.run([sys.executable, "-c", program, tmp_path], cwd=tree, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert sorted(tree.rglob("*")) == before
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "mmrt/cli/__init__.py" in names and "mmrt/setup.py" not in names


INSTALLS = ("README.md", "docs/tutorial.md", "Dockerfile")


@pytest.mark.parametrize("file", INSTALLS)
def test_nothing_but_torch_comes_from_pytorch_s_index(file: str) -> None:
    """A package of this name there, or of any of our dependencies, is never looked at."""
    text = (ROOT / file).read_text()
    (torch,) = [one for one in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"] if "torch" in one]
    assert "extra-index-url" not in text
    (install,) = re.findall(r"pip install (--index-url \S+ [^;\\]*)", text)
    assert install.split()[1] == "https://download.pytorch.org/whl/cpu" and "--no-deps" in install
    assert [word for word in install.split()[2:] if not word.startswith("-") and word != "0"] == [torch]


def test_an_index_that_cannot_be_reached_costs_one_try(tmp_path: Path) -> None:
    """README's first command against a port where nobody listens: pip asks once, and the line goes on."""
    (line,) = re.findall(r"^python3 -m venv .*--index-url.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    first, _, second = line.partition("; ")
    assert second == ".venv/bin/pip install ." and "--retries 0" in first
    command = first.partition(".venv/bin/pip ")[2].replace("https://download.pytorch.org", "http://127.0.0.1:1").split()
    isolated = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    isolated = {name: value for name, value in isolated.items() if name not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")}
    pip = [sys.executable, "-m", "pip", *command, "--target", str(tmp_path)]
    began_s = time.monotonic()
    done = subprocess.run(pip, env=isolated, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "No matching distribution found for torch" in done.stderr
    assert "Retrying" not in done.stdout + done.stderr and time.monotonic() - began_s < 60
